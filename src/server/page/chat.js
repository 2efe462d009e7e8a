// A conversation: what was said, one answer at a time, and ways out where it fails.

import { Failure, streamChat } from './api.js';
import { byId, count, counted, element, seconds, setText } from './dom.js';
import { showMarkdown } from './markdown.js';

/** Time between two drawings of an answer that grows. */
const DRAW_MS = 80;
/** Distance from the end of the log within which it follows what is written. */
const FOLLOW_PX = 60;

/** What was said and answered; the last may be a question without an answer. */
let history = [];
/** The article of the last question, and what stops its answer. */
let question = null;
let controller = null;
let onKeyRefused = () => {};

export function startChat(whenKeyRefused) {
  onKeyRefused = whenKeyRefused;
  const prompt = byId('prompt');
  byId('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (controller || !text) return prompt.focus();
    prompt.value = '';
    say(text);
  });
  prompt.addEventListener('keydown', (event) => {
    // An Enter that ends the input of a character is none of ours.
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId('composer').requestSubmit();
  });
  byId('stop').addEventListener('click', stop);
  byId('chat').addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && controller) stop();
  });
  byId('new-chat').addEventListener('click', forgetAll);
}

function stop() {
  controller?.abort();
}

function forgetAll() {
  stop();
  history = [];
  question = null;
  byId('log').replaceChildren(byId('empty') ?? element('p', { id: 'empty', class: 'empty' }, 'A new conversation.'));
  setText(byId('chat-state'), '');
  byId('prompt').focus();
}

function say(text) {
  if (history.at(-1)?.role === 'user') {
    // A question that nobody answered: templates want turns to alternate.
    history.pop();
    question?.append(element('p', { class: 'foot' }, 'Not answered, left out of what follows.'));
  }
  byId('empty')?.remove();
  history.push({ role: 'user', content: text });
  question = element('article', { class: 'message user', 'aria-label': 'You' }, element('p', { class: 'said' }, text));
  byId('log').append(question);
  ask();
}

/** Asks for an answer to the history as it is. */
async function ask() {
  const own = new AbortController();
  controller = own;
  setBusy(true);
  const answer = new AnswerView();
  const asked = history;
  let end;
  try {
    end = await answer.follow(streamChat(requestBody(), own.signal));
  } catch (error) {
    end = error.name === 'AbortError' ? { stopped: true } : { failure: error };
  }
  answer.end(end);
  if (answer.content && asked === history) history.push({ role: 'assistant', content: answer.content });
  if (controller !== own) return;
  controller = null;
  setBusy(false);
  setText(byId('chat-state'), end.stopped ? 'Stopped' : end.failure ? 'Failed' : 'Answered');
  if (end.failure?.status === 401) onKeyRefused(end.failure);
  else if (document.activeElement === document.body) byId('prompt').focus();
}

function requestBody() {
  const system = byId('system').value.trim();
  const number = (id) => (byId(id).value === '' ? undefined : Number(byId(id).value));
  return {
    messages: system ? [{ role: 'system', content: system }, ...history] : history,
    temperature: number('temperature'),
    max_completion_tokens: number('tokens-max'),
    reasoning_effort: byId('thinking').value || undefined,
  };
}

function setBusy(busy) {
  byId('log').setAttribute('aria-busy', String(busy));
  const hadFocus = document.activeElement;
  byId('send').hidden = busy;
  byId('stop').hidden = !busy;
  // A button that is gone takes the focus with it.
  if (hadFocus === byId('send') || hadFocus === byId('stop')) byId(busy ? 'stop' : 'prompt').focus();
}

/** The article of an answer. */
class AnswerView {
  constructor() {
    this.content = '';
    this.thoughts = '';
    this.began = performance.now();
    this.drawing = null;
    this.thinking = element('details', { class: 'thinking', hidden: true }, element('summary', {}, 'Thinking'), element('div', { class: 'thoughts' }));
    this.text = element('div', { class: 'text' });
    this.foot = element('p', { class: 'foot' }, 'Waiting');
    this.article = element('article', { class: 'message answer', 'aria-label': 'Answer' }, this.thinking, this.text, this.foot);
    const log = byId('log');
    log.append(this.article);
    log.scrollTop = log.scrollHeight;
  }

  /** Shows the pieces; says how the answer ended. */
  async follow(pieces) {
    const end = {};
    for await (const { beat, chunk } of pieces) {
      if (beat && !this.content && !this.thoughts) this.say(beat);
      if (chunk?.usage) end.usage = chunk.usage;
      const choice = chunk?.choices?.[0];
      if (!choice) continue;
      end.finish = choice.finish_reason ?? end.finish;
      this.add(choice.delta ?? {});
    }
    return end;
  }

  add({ content, reasoning_content: thought, tool_calls: calls }) {
    if (thought) this.thoughts += thought;
    if (content) {
      if (!this.content) this.thoughtFor = performance.now() - this.began;
      this.content += content;
    }
    // No tools are offered, so calls are shown as what they are.
    for (const call of calls ?? []) this.content += call.function?.name ? `\n\`${call.function.name}\` ` : call.function?.arguments ?? '';
    if (thought || content || calls) this.drawSoon();
  }

  say(text) {
    setText(this.foot, text.charAt(0).toUpperCase() + text.slice(1));
  }

  drawSoon() {
    this.drawing ??= setTimeout(() => this.draw(), DRAW_MS);
  }

  draw() {
    clearTimeout(this.drawing);
    this.drawing = null;
    const log = byId('log');
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < FOLLOW_PX;
    if (this.thoughts) {
      const [summary, thoughts] = this.thinking.children;
      this.thinking.hidden = false;
      setText(summary, this.content ? `Thought for ${seconds(this.thoughtFor / 1000)}` : 'Thinking …');
      setText(thoughts, this.thoughts);
    }
    showMarkdown(this.text, this.content);
    if (controller) this.say(this.content ? 'writing' : this.thoughts ? 'thinking' : 'waiting');
    if (follows) log.scrollTop = log.scrollHeight;
  }

  /** The last drawing, and how it ended. */
  end({ usage, finish, stopped, failure }) {
    this.draw();
    if (failure) {
      this.foot.replaceWith(failureNote(failure, this));
      return;
    }
    const took = (performance.now() - this.began) / 1000;
    const parts = [];
    if (stopped) parts.push(this.content ? 'Stopped' : 'Stopped before anything was written');
    if (finish === 'length') parts.push('Cut off: as many tokens as were allowed, or as the context holds');
    if (usage) {
      const reused = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${counted(usage.completion_tokens, 'token')} in ${seconds(took)}`);
      parts.push(`prompt of ${counted(usage.prompt_tokens, 'token')}${reused ? `, ${count(reused)} not read again` : ''}`);
    } else parts.push(`after ${seconds(took)}`);
    setText(this.foot, parts.join(' · '));
    const log = byId('log');
    if (log.scrollHeight - log.scrollTop - log.clientHeight < FOLLOW_PX * 2) log.scrollTop = log.scrollHeight;
  }
}

/** What happened and what can be done about it. */
function failureNote(failure, view) {
  const message = failure instanceof Failure ? failure.message : `The page stumbled: ${failure.message}`;
  const button = (text, action) => element('button', { type: 'button', onclick: action }, text);
  const again = button('Try again', () => {
    if (controller) return;
    if (history.at(-1)?.role === 'assistant') history.pop();
    view.article.remove();
    ask();
  });
  const actions = failure.code === 'context_length_exceeded' ? [button('New chat', forgetAll)] : [again];
  const partly = view.content ? ' What came until then is kept.' : '';
  const note = element('div', { class: 'failure', role: 'alert' }, element('p', {}, message + partly), ...actions);
  queueMicrotask(() => note.scrollIntoView({ block: 'nearest' }));
  return note;
}
