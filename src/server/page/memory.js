// The device's memory as two bars, one for each phase, drawn to the same scale: what lies at the same place lies below each other.

import { bytes, counted, element, setText } from './dom.js';

const HEAD = 'output head';
const PROMPT = 'prompt buffers';
const BESIDE = 'prompt buffers beside the slab';
const UNUSED = 'lent, not needed';
const SLOTS = 'expert slots';
const KEPT = 'kept slots';

/** Owners with a colour of their own; all others stay where they are in both phases and share theirs. */
const COLOURS = {
  [HEAD]: 'head', [PROMPT]: 'prompt', [BESIDE]: 'prompt', [UNUSED]: 'unused', [SLOTS]: 'slots', [KEPT]: 'slots', 'not used': 'free', reserve: 'reserve',
  'dense weights': 'dense', 'KV cache': 'kv', 'recurrent state': 'state', 'draft head': 'draft', 'captured graphs': 'graphs',
};

const colourOf = (owner) => COLOURS[owner] ?? 'other';

/**
 * The two phases as ranges of one line, `{ owner, bytes, start }`: first what stays, then the slots, the head last. While a prompt is read
 * its buffers lie where the lent slots and, if it is lent, the head lie otherwise, and end where the loan ends.
 */
export function layOut(memory) {
  const writing = new Map(memory.decode.owners.map(({ owner, bytes: size }) => [owner, size]));
  const reading = new Map(memory.prefill.owners.map(({ owner, bytes: size }) => [owner, size]));
  const moving = new Set([HEAD, PROMPT, BESIDE, UNUSED, SLOTS, KEPT]);
  const staying = [...writing].filter(([owner]) => !moving.has(owner));
  const own = Math.min(writing.get(PROMPT) ?? 0, reading.get(PROMPT) ?? 0);
  const decode = ranges([...staying, [PROMPT, own], [SLOTS, writing.get(SLOTS)], [HEAD, writing.get(HEAD)]]);
  const prefill = ranges([
    ...staying, [PROMPT, own], [KEPT, reading.get(KEPT)], [UNUSED, reading.get(UNUSED)], [PROMPT, (reading.get(PROMPT) ?? 0) - own],
    [HEAD, reading.get(HEAD)], [BESIDE, reading.get(BESIDE)],
  ]);
  const head = decode.find(({ owner }) => owner === HEAD);
  const limit = memory.budget_bytes + memory.reserve_bytes;
  const scale = Math.max(limit, memory.decode.total_bytes, memory.prefill.total_bytes);
  fill(decode, memory, limit);
  fill(prefill, memory, limit);
  return { scale, decode, prefill, head: head && { ...head, lent: !reading.has(HEAD) || reading.get(HEAD) === 0 } };
}

function ranges(owners) {
  let start = 0;
  const out = [];
  for (const [owner, size] of owners) {
    if (!size) continue;
    out.push({ owner, bytes: size, start });
    start += size;
  }
  return out;
}

/** What nobody takes, and what is kept free. */
function fill(bar, memory, limit) {
  const last = bar.at(-1);
  const end = last ? last.start + last.bytes : 0;
  const reserveStart = Math.max(end, memory.budget_bytes);
  if (reserveStart > end) bar.push({ owner: 'not used', bytes: reserveStart - end, start: end });
  if (limit > reserveStart) bar.push({ owner: 'reserve', bytes: limit - reserveStart, start: reserveStart });
}

/** Bytes of each owner in both phases, in the order of the bars. */
export function owners(layout) {
  const rows = new Map();
  const add = (bar, phase) => {
    for (const { owner, bytes: size } of bar) {
      const name = owner === KEPT ? SLOTS : owner;
      const row = rows.get(name) ?? { owner: name, writing: 0, reading: 0 };
      row[phase] += size;
      rows.set(name, row);
    }
  };
  add(layout.decode, 'writing');
  add(layout.prefill, 'reading');
  const last = ['not used', 'reserve'];
  return [...rows.values()].sort((one, other) => last.indexOf(one.owner) - last.indexOf(other.owner));
}

/** The picture. It is made anew only where the plan changes, else `phase` moves the mark. */
export class MemoryPicture {
  constructor(container) {
    this.container = container;
    this.drawn = null;
  }

  show(memory, phase, lastRequest) {
    const plan = JSON.stringify([memory.decode, memory.prefill, memory.budget_bytes, memory.reserve_bytes]);
    if (plan !== this.drawn) {
      this.drawn = plan;
      this.draw(layOut(memory), memory);
    }
    const reading = phase === 'reading';
    this.mark(this.writing, !reading, phase === 'idle' ? 'now, at rest' : 'now');
    this.mark(this.reading, reading, 'now');
    setText(this.last, lastLoan(lastRequest));
    setText(this.free, memory.lowest_free_bytes == null ? '' : `At least ${bytes(memory.lowest_free_bytes)} were free during the last request.`);
  }

  mark(bar, now, word) {
    bar.figure.classList.toggle('now', now);
    setText(bar.now, now ? word : '');
  }

  draw(layout, memory) {
    this.writing = barOf('While writing', layout.decode, layout);
    this.reading = barOf('While a prompt is read', layout.prefill, layout, layout.head);
    this.last = element('p', { class: 'detail' });
    this.free = element('p', { class: 'detail' });
    this.container.replaceChildren(
      this.writing.figure, this.reading.figure, headText(layout.head, memory), this.last, this.free, tableOf(owners(layout)),
    );
  }
}

/** One phase; with `head` the head's range is marked. */
function barOf(title, bar, layout, head) {
  const share = (size) => `${(100 * size) / layout.scale}%`;
  const track = element('div', { class: 'track', role: 'img' });
  track.setAttribute('aria-label', `${title}: ${bar.map((range) => `${range.owner} ${bytes(range.bytes)}`).join(', ')}`);
  for (const range of bar) {
    const part = element('span', { class: `part own-${colourOf(range.owner)}`, title: `${range.owner}: ${bytes(range.bytes)}` });
    part.style.width = share(range.bytes);
    if (range.bytes > layout.scale / 8) part.append(range.owner);
    track.append(part);
  }
  const now = element('span', { class: 'now-word' });
  const parts = [element('figcaption', {}, `${title} `, now), track];
  if (head) {
    const range = element('div', { class: `head-range ${head.lent ? 'lent' : 'kept'}`, 'aria-hidden': 'true' });
    range.style.marginLeft = share(head.start);
    range.style.width = share(head.bytes);
    parts.push(range);
  }
  return { figure: element('figure', { class: 'bar' }, ...parts), now };
}

function headText(head, memory) {
  if (!head) return element('p', { class: 'detail' }, 'This device holds no output head.');
  const range = `The output head's range (${bytes(head.bytes)}, the bracket) `;
  if (head.lent) return element('p', { class: 'detail' }, `${range}may be lent to the prompt's buffers: the lower bar shows the largest loan.`);
  const why = memory.head_alias ? 'is kept in the largest loan, which does without it.' : 'is kept; --prefill-head-alias lets it be lent.';
  return element('p', { class: 'detail' }, range + why);
}

/** What the last prompt really borrowed. */
function lastLoan(request) {
  if (!request?.way) return '';
  const slots = request.slots_lent ? counted(request.slots_lent, 'slot') : 'no slot';
  return `The last prompt was lent ${request.way === 'alias' ? `the head and ${slots}` : `${slots}, not the head`}.`;
}

function tableOf(rows) {
  const cell = (size) => element('td', {}, size ? bytes(size) : '–');
  const line = ({ owner, writing, reading }) => {
    const swatch = element('span', { class: `swatch own-${colourOf(owner)}`, 'aria-hidden': 'true' });
    return element('tr', { class: writing === reading ? '' : 'differs' }, element('th', { scope: 'row' }, swatch, owner), cell(writing), cell(reading));
  };
  const head = element('tr', {}, ...['Owner', 'writing', 'reading'].map((text) => element('th', { scope: 'col' }, text)));
  return element('table', { class: 'owners' }, element('caption', { class: 'aside' }, 'Bytes of each owner in both phases'),
    element('thead', {}, head), element('tbody', {}, ...rows.map(line)));
}
