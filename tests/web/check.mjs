// The page of `ebbtide serve` in a real browser: chat, stop, monitor, key, errors, and pictures of it in both sizes and both colours.
//
//     node tests/web/check.mjs --engine target/release/ebbtide --screenshots DIR
//
// tools/web_check.sh installs what this needs. The server is the real program with a bundled model; only what cannot be had from it at will
// (a load that lasts, thoughts, hostile text) is played.

import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

import { openBrowser, PATIENCE_MS, SIZES } from './browser.mjs';
import { checkMarkdown } from './markdown.mjs';
import { startServer } from './server.mjs';

const { values: options } = parseArgs({
  options: {
    engine: { type: 'string', default: 'target/release/ebbtide' },
    model: { type: 'string', default: 'assets/bard-qwen35moe-22m-mtp-IQ4_NL.gguf' },
    chromium: { type: 'string', default: process.env.CHROMIUM ?? '/usr/bin/chromium' },
    screenshots: { type: 'string', default: 'target/web-screenshots' },
  },
});
// One thread and small chunks: a prompt takes several looks of the monitor on any machine.
const FLAGS = ['-m', options.model, '--vram-mib', '24', '--ctx', '4096', '--prefill-head-alias', '--threads', '1', '--prefill', '64', '--prefill-block', 'chunk', '--temp', '0.8', '--seed', '4'];
const TEXT = readFileSync(new URL('../../assets/demo.txt', import.meta.url), 'utf8');
const PATIENCE = { timeout: PATIENCE_MS };

async function step(name, work) {
  const began = performance.now();
  await work();
  console.log(`${name}: ${Math.round(performance.now() - began)} ms`);
}

const text = (page, selector) => page.locator(selector).innerText();
const waitForText = (page, selector, part) => page.locator(selector, { hasText: part }).first().waitFor(PATIENCE);

/** Writes a message and sends it with the keyboard alone. */
async function send(page, message) {
  await page.locator('#prompt').fill(message);
  await page.locator('#prompt').press('Enter');
}

async function setTokensMax(page, tokens) {
  await page.locator('.options').evaluate((details) => { details.open = true; });
  await page.locator('#tokens-max').fill(tokens);
  await page.locator('.options').evaluate((details) => { details.open = false; });
}

/** Remembers every text that an element shows. */
async function record(page, selector) {
  await page.evaluate((which) => {
    const node = document.querySelector(which);
    (window.seen ??= {})[which] = [node.textContent];
    new MutationObserver(() => window.seen[which].push(node.textContent)).observe(node, { childList: true, characterData: true, subtree: true });
  }, selector);
  return () => page.evaluate((which) => window.seen[which], selector);
}

async function chatAnswers(page) {
  await setTokensMax(page, '40');
  await send(page, 'To be, or not to be?');
  await waitForText(page, '#chat-state', 'Answered');
  const foot = await text(page, '.answer .foot');
  assert.match(foot, /^(Cut off: as many tokens|\d+ tokens? in)/, foot);
  assert.match(foot, /\d+ tokens? in .*prompt of \d+ tokens/, 'the usage is shown');
  assert.ok((await text(page, '.answer .text')).length > 20, 'an answer is there');
}

async function monitorMoves(page, base) {
  const phases = await record(page, '#phase');
  const now = await record(page, '#now');
  const before = await text(page, '#figures');
  await page.locator('#new-chat').click();
  await send(page, TEXT);
  await page.locator('.bar.now figcaption', { hasText: 'While a prompt is read' }).waitFor(PATIENCE);
  await page.locator('#now-bar').waitFor(PATIENCE);
  await page.screenshot({ path: `${options.screenshots}/desktop-reading.png` });
  await waitForText(page, '#chat-state', 'Answered');
  await page.locator('.bar.now figcaption', { hasText: 'While writing' }).waitFor(PATIENCE);
  await page.locator('#requests > li:nth-child(2) summary').waitFor(PATIENCE);
  assert.ok((await phases()).includes('Reading a prompt'), `the phases seen were ${await phases()}`);
  const shares = (await now()).map((line) => /: ([\d.]+) % of/.exec(line)?.[1]).filter(Boolean);
  assert.ok(new Set(shares).size >= 2, `the share of the prompt grows: ${shares}`);
  const after = await text(page, '#figures');
  assert.notEqual(after, before);

  // What is shown is what the server says.
  const status = await (await fetch(`${base}/v1/status`)).json();
  const last = status.last_requests[0];
  const shown = await text(page, '#requests > li:first-child');
  assert.ok(shown.includes(`${last.prompt_tokens.toLocaleString('en')} prompt tokens`), shown);
  await page.locator('#requests > li:first-child summary').click();
  const opened = await text(page, '#requests > li:first-child details');
  assert.ok(opened.includes(last.way_reason), opened);
  assert.ok(after.includes(`${status.slots.in_use} of ${status.slots.experts}`), after);
  const rows = await page.locator('.owners tbody tr').evaluateAll((all) => all.map((row) => row.innerText.split('\t')));
  const head = rows.find(([owner]) => owner.trim() === 'output head');
  const lent = !status.memory.prefill.owners.some(({ owner }) => owner === 'output head');
  assert.equal(lent, true, 'with these flags the plan lends the head');
  assert.deepEqual(head.slice(1), ['1.1 MiB', '–'], `the head's bytes: ${head}`);
  for (const { owner } of status.memory.decode.owners.filter(({ bytes }) => bytes > 0)) {
    assert.ok(rows.some(([name]) => name.trim() === owner), `${owner} is missing`);
  }
}

/** In both bars the same place is the same address: the range of the head ends where the bars' owners end. */
async function barsLieTrue(page) {
  const edges = await page.evaluate(() => {
    const right = (node) => node.getBoundingClientRect().right;
    const [writing, reading] = document.querySelectorAll('.bar');
    const last = (bar, name) => right([...bar.querySelectorAll(`.own-${name}`)].at(-1));
    return { head: last(writing, 'head'), prompt: last(reading, 'prompt'), mark: right(reading.querySelector('.head-range')) };
  });
  assert.ok(Math.abs(edges.head - edges.prompt) < 1.5 && Math.abs(edges.head - edges.mark) < 1.5, JSON.stringify(edges));
}

async function stopStops(page, base) {
  await setTokensMax(page, '');
  await page.locator('#new-chat').click();
  await send(page, 'Tell me of the sea.');
  await page.waitForFunction(() => (document.querySelector('.answer .text')?.textContent.length ?? 0) > 30, null, PATIENCE);
  await page.locator('#stop').click();
  await waitForText(page, '#chat-state', 'Stopped');
  assert.match(await text(page, '.answer .foot'), /^Stopped/);
  // The server, too, has stopped, long before the context is full.
  await waitForText(page, '#requests > li:first-child', 'cancelled');
  const status = await (await fetch(`${base}/v1/status`)).json();
  assert.equal(status.totals.cancelled, 1);
  assert.ok(status.last_requests[0].completion_tokens < 3000);

  // Again by the keyboard, and the conversation goes on.
  await send(page, 'And of the land?');
  await page.waitForFunction(() => document.querySelectorAll('.answer').length === 2, null, PATIENCE);
  await page.keyboard.press('Escape');
  await waitForText(page, '.answer:last-child .foot', 'Stopped');
  await setTokensMax(page, '8');
  await send(page, 'Amen.');
  await waitForText(page, '#chat-state', 'Answered');
}

async function tooLongIsTold(page) {
  await page.locator('#new-chat').click();
  await send(page, TEXT.repeat(3));
  await page.locator('.failure').waitFor(PATIENCE);
  const told = await text(page, '.failure');
  assert.match(told, /the prompt has \d+ tokens, the context holds 4096/);
  await page.locator('.failure button', { hasText: 'New chat' }).click();
  assert.equal(await page.locator('.message').count(), 0);
}

/** An answer with thoughts, with markup that would run if it could. */
async function hostileTextStaysText(page) {
  const thought = '<img src=x onerror="window.broken = 1"> Let me think.';
  const said = '**Bold** <script>window.broken = 2</script> [no](javascript:window.broken=3) <img src=/x onerror="window.broken=4">\n\n- one\n- two';
  const chunk = (delta, finish = null) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] })}\n\n`;
  const body = `: reading the prompt, 40 %\n\n${chunk({ reasoning_content: thought })}${chunk({ content: said })}${chunk({}, 'stop')}data: [DONE]\n\n`;
  await page.route('**/v1/chat/completions', (route) => route.fulfill({ contentType: 'text/event-stream', body }));
  await page.locator('#new-chat').click();
  await send(page, 'Think!');
  await waitForText(page, '#chat-state', 'Answered');
  await page.unroute('**/v1/chat/completions');
  assert.equal(await page.locator('.thinking').evaluate((details) => details.open), false, 'thoughts are folded');
  assert.match(await text(page, '.thinking summary'), /^Thought for/);
  await page.locator('.thinking summary').click();
  assert.equal(await text(page, '.thoughts'), thought);
  assert.equal(await page.locator('.answer strong').innerText(), 'Bold');
  assert.equal(await page.locator('.answer li').count(), 2);
  assert.equal(await page.locator('.answer :is(script, img, a)').count(), 0);
  assert.equal(await page.evaluate(() => window.broken), undefined);
}

/** What an answer says that breaks off, and that trying again helps. */
async function brokenAnswerCanBeTriedAgain(page) {
  const error = { error: { message: 'the engine died', code: 'engine_died' } };
  const body = `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content: 'Half an' } }] })}\n\ndata: ${JSON.stringify(error)}\n\ndata: [DONE]\n\n`;
  await page.route('**/v1/chat/completions', (route) => route.fulfill({ contentType: 'text/event-stream', body }), { times: 1 });
  await page.locator('#new-chat').click();
  await send(page, 'Speak.');
  await waitForText(page, '.failure', 'the engine died');
  await page.locator('.failure button', { hasText: 'Try again' }).click();
  await waitForText(page, '#chat-state', 'Answered');
  assert.equal(await page.locator('.answer').count(), 1);
}

async function loadingIsShown(page, base) {
  const status = await (await fetch(`${base}/v1/status`)).json();
  const loading = { ...status, health: 'loading', progress: { bytes_done: 3 << 20, bytes_total: 12 << 20, share: 0.25 }, memory: null, slots: null };
  await page.route('**/v1/status', (route) => route.fulfill({ json: loading }));
  await waitForText(page, '#loading-text', '3.0 MiB of 12.0 MiB');
  assert.equal(await page.locator('#loading-bar').evaluate((bar) => bar.value), 0.25);
  await page.unroute('**/v1/status');
  await page.locator('#loading').waitFor({ state: 'hidden', ...PATIENCE });
}

async function pollsLessWhenHidden(page) {
  const asked = async (hidden, forMs) => {
    let times = 0;
    const onRequest = (request) => { times += request.url().endsWith('/v1/status') ? 1 : 0; };
    await page.evaluate((value) => {
      Object.defineProperty(document, 'hidden', { value, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }, hidden);
    page.on('request', onRequest);
    await page.waitForTimeout(forMs);
    page.off('request', onRequest);
    return times;
  };
  const hidden = await asked(true, 2200);
  const shown = await asked(false, 2200);
  assert.ok(hidden <= 1 && shown >= 2, `${hidden} while hidden, ${shown} while shown`);
}

/** Nothing sticks out at the side, whatever the view. */
async function fits(page, where) {
  const { content, window: width } = await page.evaluate(() => ({ content: document.documentElement.scrollWidth, window: innerWidth }));
  assert.ok(content <= width, `${where}: ${content} px of content in ${width} px`);
}

async function takePictures(page) {
  for (const [size, viewport] of Object.entries(SIZES)) {
    await page.setViewportSize(viewport);
    for (const colorScheme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
      for (const view of size === 'phone' ? ['monitor', 'chat'] : ['both']) {
        if (view !== 'both') await page.locator(`[data-show=${view}]`).click();
        await fits(page, `${size} ${view}`);
        await page.locator('#monitor').evaluate((monitor) => monitor.scrollTo(0, 0));
        await page.screenshot({ path: `${options.screenshots}/${size}-${view}-${colorScheme}.png` });
      }
    }
  }
}

/** A long page for the pictures: an answer with everything, below a question. */
async function showRichAnswer(page) {
  const said = readFileSync(new URL('answer.md', import.meta.url), 'utf8');
  const pieces = [{ reasoning_content: 'They want an overview. A list, a table and some code will do.' }, { content: said }];
  const chunks = pieces.map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\n\n`).join('');
  const usage = { prompt_tokens: 1712, completion_tokens: 254, prompt_tokens_details: { cached_tokens: 1664 } };
  const body = `${chunks}data: ${JSON.stringify({ choices: [], usage })}\n\ndata: [DONE]\n\n`;
  await page.route('**/v1/chat/completions', (route) => route.fulfill({ contentType: 'text/event-stream', body }), { times: 1 });
  await page.locator('#new-chat').click();
  await send(page, 'How does a prompt get its memory?\nPlease be brief.');
  await waitForText(page, '#chat-state', 'Answered');
}

async function keyIsAsked(browser, base) {
  const { page, problems } = await browser.open(base);
  await page.locator('#key-form').waitFor(PATIENCE);
  await waitForText(page, '#health', 'ready');
  problems.none('before a key is given');
  problems.allow(/401/);
  await page.locator('#key').fill('wrong');
  await page.locator('#key').press('Enter');
  await waitForText(page, '#key-why', 'the key is not the one');
  await page.locator('#key').fill('sesame');
  await page.locator('#key').press('Enter');
  await page.locator('.bar').first().waitFor(PATIENCE);
  assert.equal(await page.locator('#key-form').isVisible(), false);
  await setTokensMax(page, '5');
  await send(page, 'Open!');
  await waitForText(page, '#chat-state', 'Answered');
  assert.deepEqual(await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]), [['sesame'], [], '']);
  problems.none('with a key');
  await page.close();
}

async function goneServerIsTold(browser, flags) {
  const server = await startServer(options.engine, flags);
  const { page, problems } = await browser.open(server.base);
  await waitForText(page, '#health', 'ready');
  problems.allow(/ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET|ERR_INCOMPLETE_CHUNKED_ENCODING/);
  await server.stop();
  await waitForText(page, '#trouble', 'cannot be reached');
  await send(page, 'Anybody?');
  await waitForText(page, '.failure', 'cannot be reached');
  problems.none('without a server');
  await page.close();
}

async function main() {
  mkdirSync(options.screenshots, { recursive: true });
  const open = await startServer(options.engine, FLAGS);
  const locked = await startServer(options.engine, [...FLAGS, '--api-key', 'sesame']);
  const browser = await openBrowser(options.chromium);
  try {
    const { page, problems } = await browser.open(open.base);
    await waitForText(page, '#health', 'ready');
    await step('markdown', () => checkMarkdown(page));
    await step('chat', () => chatAnswers(page));
    await step('monitor during a prompt', () => monitorMoves(page, open.base));
    await step('bars', () => barsLieTrue(page));
    await step('stop', () => stopStops(page, open.base));
    await step('a prompt that is too long', () => tooLongIsTold(page).then(() => problems.forget(/400/)));
    await step('hostile text', () => hostileTextStaysText(page));
    await step('a broken answer', () => brokenAnswerCanBeTriedAgain(page));
    await step('loading', () => loadingIsShown(page, open.base));
    await step('hidden', () => pollsLessWhenHidden(page));
    await step('pictures', () => showRichAnswer(page).then(() => takePictures(page)));
    problems.none('in the whole run');
    await step('key', () => keyIsAsked(browser, locked.base));
    await step('no server', () => goneServerIsTold(browser, FLAGS));
  } finally {
    await browser.close();
    await Promise.all([open.stop(), locked.stop()]);
  }
  console.log(`the page works; pictures are in ${options.screenshots}`);
}

await main();
