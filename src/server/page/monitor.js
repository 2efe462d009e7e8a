// What the server does now, asked for once a second.

import { Failure, health, key, status } from './api.js';
import { byId, bytes, count, counted, element, percent, rate, seconds, setProgress, setText } from './dom.js';
import { MemoryPicture } from './memory.js';

const EVERY_MS = 1000;
/** While nobody looks. */
const HIDDEN_MS = 15_000;
/** Most time between tries where nobody answers. */
const RETRY_MS_MAX = 10_000;

const PHASES = { idle: 'Idle', reading: 'Reading a prompt', writing: 'Writing' };
const WAYS = {
  windows: 'as windows, nothing lent',
  loan: 'in lent slots, the head kept',
  alias: 'in lent slots and the lent head',
};

/** Looks until the page is closed. `onKeyRefused` is told why the server wants another key. */
export function startMonitor(onKeyRefused) {
  const picture = new MemoryPicture(byId('memory'));
  let timer = null;
  let failures = 0;
  let asking = false;

  async function look() {
    if (asking) return;
    asking = true;
    const began = Date.now();
    try {
      // Without its key only the health can be had.
      if (key.missing()) showHealth(await health());
      else show(await status(), picture);
      failures = 0;
      showTrouble('');
    } catch (error) {
      if (error.status === 401) {
        key.demanded = true;
        onKeyRefused(error);
      } else {
        failures += 1;
        showUnreachable(error);
      }
    }
    asking = false;
    plan(began);
  }

  /** By the clock: the time that an answer took is not added. */
  function plan(began) {
    clearTimeout(timer);
    const every = document.hidden ? HIDDEN_MS : Math.min(EVERY_MS * 2 ** failures, RETRY_MS_MAX);
    timer = setTimeout(look, Math.max(began + every - Date.now(), 50));
  }

  document.addEventListener('visibilitychange', () => (document.hidden ? plan(Date.now()) : look()));
  look();
  return { look };
}

function showUnreachable(error) {
  const pill = byId('health');
  setText(pill, 'no answer');
  pill.className = 'pill bad';
  setText(byId('phase'), 'Not known');
  setText(byId('now'), '');
  byId('now-bar').hidden = true;
  const message = error instanceof Failure ? error.message : 'The server takes too long to answer.';
  showTrouble(`${message} The monitor shows what was known last and tries again by itself.`);
}

function showTrouble(text) {
  const trouble = byId('trouble');
  setText(trouble, text);
  trouble.hidden = text === '';
}

function show(state, picture) {
  showHealth({ status: state.health, reason: state.reason, progress: state.progress });
  const model = byId('model');
  setText(model, modelText(state));
  model.title = model.textContent;
  showNow(state);
  if (state.memory) picture.show(state.memory, state.phase, state.last_requests[0]);
  showFigures(state);
  showRequests(state.last_requests);
}

function showHealth({ status: word, reason, progress }) {
  const pill = byId('health');
  setText(pill, word);
  pill.className = `pill ${{ ready: 'good', loading: 'busy' }[word] ?? 'bad'}`;
  pill.title = reason ?? '';
  const loading = word === 'loading';
  byId('loading').hidden = !loading;
  if (!loading) return;
  const known = progress?.bytes_total > 0;
  setText(byId('loading-text'), known
    ? `The model is being loaded: ${bytes(progress.bytes_done)} of ${bytes(progress.bytes_total)}`
    : 'The model is being loaded');
  setProgress(byId('loading-bar'), known ? progress.share : null);
}

function modelText({ model, device, reason }) {
  const parts = [model?.name, model?.ctx_tokens && `${count(model.ctx_tokens)} tokens of context`, device, reason];
  return parts.filter(Boolean).join(' · ');
}

function showNow({ phase, running, queue }) {
  const word = byId('phase');
  setText(word, PHASES[phase] ?? phase);
  word.className = `phase ${phase}`;
  setText(byId('now'), running ? runningText(running, phase) : queue.waiting ? `${counted(queue.waiting, 'answer')} waiting` : '');
  const bar = byId('now-bar');
  bar.hidden = phase !== 'reading';
  setProgress(bar, running?.read_share);
}

function runningText(running, phase) {
  const request = `request ${running.id} (${running.api}), ${seconds(running.seconds)}`;
  if (phase === 'reading') {
    const share = running.read_share == null ? '' : `${percent(running.read_share)} of `;
    return `${request}: ${share}${counted(running.prompt_tokens, 'token')}`;
  }
  const speed = running.write_tokens_per_s == null ? '' : `, ${rate(running.write_tokens_per_s)} a second`;
  return `${request}: ${counted(running.written_tokens, 'token')}${speed}`;
}

function showFigures(state) {
  const { experts, rates, queue, slots, prefix_cache: prefix, totals, running, uptime_s: uptime } = state;
  const drafts = totals.drafts_offered ? `${percent(totals.drafts_accepted / totals.drafts_offered)} of ${count(totals.drafts_offered)}` : '–';
  const figures = [
    ['Reading', `${rate(rates.read_tokens_per_s)} tok/s`, 'last prompt'],
    ['Writing', `${rate(running?.write_tokens_per_s ?? rates.write_tokens_per_s)} tok/s`, running?.write_tokens_per_s ? 'now' : 'last answer'],
    ['Expert slots', slots ? `${count(slots.in_use)} of ${count(slots.experts)}` : '–', slots ? slotsDetail(slots) : ''],
    ['Hit rate', percent(experts.hit_rate_last), `last request; ${percent(experts.hit_rate)} since start`],
    ['Queue', `${count(queue.waiting)} of ${count(queue.max)}`, counted(queue.clients, 'client')],
    ['Requests', count(totals.completed), `${count(totals.cancelled)} cancelled, ${count(totals.failed)} failed, ${count(totals.refused)} refused`],
    ['Tokens', `${count(totals.completion_tokens)} written`, `${count(totals.prompt_tokens)} of prompts, ${count(totals.cached_tokens)} not read again`],
    ['Drafts accepted', drafts, ''],
    ['Prefix cache', bytes(prefix.bytes), `${count(prefix.parked)} parked, ${count(prefix.resumed)} resumed`],
    ['Uptime', seconds(Math.floor(uptime)), totals.worker_deaths ? `the engine died ${counted(totals.worker_deaths, 'time')}` : ''],
  ];
  const list = byId('figures');
  if (!list.childElementCount) {
    list.append(...figures.map(([name]) => element('div', {}, element('dt', {}, name), element('dd', {}), element('dd', { class: 'detail' }))));
  }
  figures.forEach(([, value, detail], index) => {
    const [, shown, below] = list.children[index].children;
    setText(shown, value);
    setText(below, detail);
  });
}

function slotsDetail({ in_use: used, experts, bytes_each: each }) {
  const share = experts ? `${percent(used / experts)} of the experts, ` : '';
  return `${share}${bytes(each)} each`;
}

let requestsShown = '';

function showRequests(requests) {
  // Only what changed is made anew: somebody may be reading, or have one opened.
  const ids = requests.map(({ id, ended_unix_s: ended }) => `${id}:${ended}`).join();
  if (ids === requestsShown) return;
  requestsShown = ids;
  const list = byId('requests');
  const opened = new Set([...list.querySelectorAll('details[open]')].map((details) => details.dataset.id));
  list.replaceChildren(...requests.map((request) => requestItem(request, opened.has(String(request.id)))));
  byId('no-requests').hidden = requests.length > 0;
}

function requestItem(request, open) {
  const reused = request.cached_tokens ? `, ${count(request.cached_tokens)} not read again` : '';
  const ended = new Date(request.ended_unix_s * 1000);
  const title = element('p', { class: 'request-title' },
    element('span', { class: `finish ${request.finish}` }, request.finish),
    ` ${request.api} ${request.id}, `, element('time', { dateTime: ended.toISOString() }, ended.toLocaleTimeString('en-GB')));
  const counts = `${counted(request.prompt_tokens, 'prompt token')}${reused}, ${counted(request.completion_tokens, 'token')} written`;
  const lines = [title, element('p', {}, counts)];
  if (request.error) lines.push(element('p', { class: 'error-text' }, request.error));
  if (request.way) lines.push(wayOf(request, open));
  return element('li', {}, ...lines);
}

function wayOf(request, open) {
  const facts = [
    request.way_reason && `Why: ${request.way_reason}`,
    request.chunk > 0 && `Chunks of ${count(request.chunk)}, blocks of ${count(request.block)} tokens`,
    `${counted(request.slots_lent, 'slot')} lent, head brought back ${counted(request.head_reloads, 'time')}, hit rate ${percent(request.hit_rate)}`,
    `Waited ${seconds(request.waited_s)}, read in ${seconds(request.read_s)} (${rate(request.read_tokens_per_s)} tok/s), wrote in ${seconds(request.write_s)} (${rate(request.write_tokens_per_s)} tok/s)`,
    `First difference to what was known at token ${count(request.first_difference)}`,
  ];
  const details = element('details', { open },
    element('summary', {}, `Read ${WAYS[request.way] ?? request.way}`),
    element('ul', {}, ...facts.filter(Boolean).map((fact) => element('li', {}, fact))));
  details.dataset.id = request.id;
  return details;
}
