// Markdown as models write it, into elements. Text becomes text nodes and nothing else; images are never loaded, links are followed only
// when clicked. What is not understood stays as it was written.

import { element } from './dom.js';

/** Quotes in quotes, lists in lists and emphasis in emphasis go this deep; what is deeper is shown as it is. */
const DEPTH_MAX = 8;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

/**
 * Shows `text` in `container`. Blocks whose source is unchanged stay as they are, so that an answer that grows is not made anew with each
 * piece.
 */
export function showMarkdown(container, text) {
  const blocks = blocksOf(text.split('\n'));
  blocks.forEach((block, index) => {
    const old = container.childNodes[index];
    if (old?.source === block.source) return;
    const node = nodeOf(block, 0);
    node.source = block.source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.childNodes.length > blocks.length) container.lastChild.remove();
}

/** Cuts lines into blocks: `{ kind, lines, source }`. */
export function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === '') {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at);
    const end = block.end;
    blocks.push({ ...block, source: `${block.kind}\n${lines.slice(at, end).join('\n')}` });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: 'heading', level: heading[1].length, text: heading[2], end: at + 1 };
  if (RULE.test(line)) return { kind: 'rule', end: at + 1 };
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (next) => QUOTE.test(next));
    return { kind: 'quote', lines: lines.slice(at, end).map((next) => next.replace(QUOTE, '')), end };
  }
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTableAt(lines, at)) {
    const end = endOf(lines, at, (next) => next.includes('|'));
    return { kind: 'table', head: cellsOf(line), rows: lines.slice(at + 2, end).map(cellsOf), end };
  }
  const end = endOf(lines, at + 1, (next, index) => next.trim() !== '' && !beginsBlock(lines, index));
  return { kind: 'paragraph', text: lines.slice(at, end).join('\n'), end };
}

/** The first line from `at` on for which `goesOn` does not hold. */
function endOf(lines, at, goesOn) {
  let end = at;
  while (end < lines.length && goesOn(lines[end], end)) end += 1;
  return end;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTableAt(lines, at);
}

function isTableAt(lines, at) {
  return lines[at].includes('|') && at + 1 < lines.length && lines[at + 1].includes('-') && TABLE_RULE.test(lines[at + 1]);
}

/** A fence that is not closed goes to the end: the rest may still come. */
function codeAt(lines, at, [, mark, language]) {
  const closes = (line) => line.trim().startsWith(mark) && line.trim().replaceAll(mark[0], '') === '';
  const end = endOf(lines, at + 1, (line) => !closes(line));
  return { kind: 'code', language: language.trim().split(/\s/)[0], text: lines.slice(at + 1, end).join('\n'), end: Math.min(end + 1, lines.length) };
}

/** Items of one list; what is indented below an item belongs to it. */
function listAt(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const depth = line.length - line.trimStart().length;
    if (item && depth <= indent.length + 1 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push({ lines: [item[3]], inner: item[1].length + item[2].length + 1 });
    } else if (line.trim() === '') {
      const next = lines[end + 1];
      if (next === undefined || !(ITEM.test(next) || next.startsWith(' '.repeat(indent.length + 2)))) break;
      items.at(-1).lines.push('');
    } else if (depth > indent.length + 1 || !beginsBlock(lines, end)) {
      // A line that goes on without being indented belongs to the item, unless a blank one came between.
      if (depth <= indent.length + 1 && items.at(-1).lines.at(-1) === '') break;
      items.at(-1).lines.push(line.slice(Math.min(depth, items.at(-1).inner)));
    } else break;
    end += 1;
  }
  return { kind: 'list', ordered, start: ordered ? parseInt(mark, 10) : 1, items: items.map((item) => item.lines), end };
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, '').replace(/(?<!\\)\|$/, '');
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll('\\|', '|'));
}

function nodeOf(block, depth) {
  switch (block.kind) {
    case 'code': {
      const code = element('code', {}, block.text);
      return element('pre', { tabIndex: 0, 'aria-label': block.language ? `Code, ${block.language}` : 'Code' }, code);
    }
    // The page has headings of its own: those of an answer come below them.
    case 'heading': return element(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text, depth));
    case 'rule': return element('hr');
    case 'quote': return element('blockquote', {}, ...nested(block.lines, depth));
    case 'list': {
      const items = block.items.map((lines) => element('li', {}, ...itemOf(lines, depth)));
      const list = element(block.ordered ? 'ol' : 'ul', {}, ...items);
      if (block.ordered && block.start !== 1) list.start = block.start;
      return list;
    }
    case 'table': return tableOf(block, depth);
    default: return element('p', {}, ...inline(block.text, depth));
  }
}

function nested(lines, depth) {
  if (depth >= DEPTH_MAX) return [lines.join('\n')];
  return blocksOf(lines).map((block) => nodeOf(block, depth + 1));
}

/** An item of a single paragraph is set without one. */
function itemOf(lines, depth) {
  const nodes = nested(lines, depth);
  const [first, ...others] = nodes;
  if (first?.tagName !== 'P') return nodes;
  return [...first.childNodes, ...others];
}

function tableOf({ head, rows }, depth) {
  const row = (cells, name) => element('tr', {}, ...head.map((_, index) => element(name, {}, ...inline(cells[index] ?? '', depth))));
  const table = element('table', {}, element('thead', {}, row(head, 'th')), element('tbody', {}, ...rows.map((cells) => row(cells, 'td'))));
  return element('div', { class: 'wide', tabIndex: 0, role: 'group', 'aria-label': 'Table' }, table);
}

/** What a mark around text makes of it; the longer marks first. */
const MARKS = [['***', ['strong', 'em']], ['**', ['strong']], ['__', ['strong']], ['~~', ['del']], ['*', ['em']], ['_', ['em']]];

/** Text with code, emphasis and links, as nodes. */
export function inline(text, depth) {
  const nodes = [];
  let plain = '';
  const put = (node) => {
    if (plain) nodes.push(plain);
    plain = '';
    nodes.push(node);
  };
  // Marks that nothing closes from here on: looking again for each of thousands would take for ever.
  const unclosed = new Set();
  let at = 0;
  while (at < text.length) {
    const found = depth < DEPTH_MAX ? spanAt(text, at, depth, unclosed) : null;
    if (!found) {
      plain += text[at];
      at += 1;
    } else {
      if (found.node) put(found.node);
      else plain += found.text;
      at = found.end;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** What begins at `at` and is more than a character: `{ node or text, end }`. */
function spanAt(text, at, depth, unclosed) {
  switch (text[at]) {
    case '\\': return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? '') ? { text: text[at + 1], end: at + 2 } : null;
    case '`': return codeSpanAt(text, at, unclosed);
    case '[': return linkAt(text, at, depth);
    case '!': return text[at + 1] === '[' ? linkAt(text, at + 1, depth) : null;
    case '<': return addressAt(text, at);
    case ' ': return text.startsWith('  \n', at) ? { node: element('br'), end: at + 3 } : null;
    case '*': case '_': case '~': return emphasisAt(text, at, depth, unclosed);
    default: return null;
  }
}

function codeSpanAt(text, at, unclosed) {
  const mark = /^`+/.exec(text.slice(at, at + 40))[0];
  let end = unclosed.has(mark) ? -1 : text.indexOf(mark, at + mark.length);
  // As many backticks close it as opened it, neither more nor fewer.
  while (end >= 0 && (text[end + mark.length] === '`' || text[end - 1] === '`')) end = text.indexOf(mark, end + 1);
  if (end < 0) {
    unclosed.add(mark);
    return { text: mark, end: at + mark.length };
  }
  const inner = text.slice(at + mark.length, end).replaceAll('\n', ' ');
  const padded = inner.startsWith(' ') && inner.endsWith(' ') && inner.trim();
  return { node: element('code', {}, padded ? inner.slice(1, -1) : inner), end: end + mark.length };
}

function emphasisAt(text, at, depth, unclosed) {
  for (const [mark, names] of MARKS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const from = at + mark.length;
    if (!/\S/.test(text[from] ?? '')) continue;
    // snake_case is no emphasis.
    if (mark[0] === '_' && /\w/.test(text[at - 1] ?? '')) continue;
    const end = closingOf(text, mark, from);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    const inner = inline(text.slice(from, end), depth + 1);
    const node = names.reduceRight((children, name) => [element(name, {}, ...children)], inner)[0];
    return { node, end: end + mark.length };
  }
  // The whole run, else its later characters would be looked at as marks of their own.
  const run = /^[*_~]+/.exec(text.slice(at, at + 40))[0];
  return { text: run, end: at + run.length };
}

function closingOf(text, mark, from) {
  let end = text.indexOf(mark, from + 1);
  while (end >= 0) {
    const whole = mark.length > 1 || (text[end + 1] !== mark && text[end - 1] !== mark);
    const word = mark[0] === '_' && /\w/.test(text[end + mark.length] ?? '');
    if (whole && !word && /\S/.test(text[end - 1])) return end;
    end = text.indexOf(mark, end + 1);
  }
  return -1;
}

function linkAt(text, at, depth) {
  const close = text.indexOf('](', at);
  if (close < 0 || close - at > 1000) return null;
  const address = /^\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\s*\)/.exec(text.slice(close + 1, close + 2100));
  if (!address) return null;
  const label = inline(text.slice(at + 1, close), depth + 1);
  return { node: linkOf(address[1], label), end: close + 1 + address[0].length };
}

function addressAt(text, at) {
  const address = /^<((?:https?|mailto):[^\s<>]{1,2000})>/.exec(text.slice(at, at + 2010));
  return address && { node: linkOf(address[1], [address[1]]), end: at + address[0].length };
}

/** A link where the address is of the web or mail, else its text. */
function linkOf(address, label) {
  const shown = label.length ? label : [address];
  let target;
  try {
    target = new URL(address);
  } catch {
    return element('span', {}, ...shown);
  }
  if (!['http:', 'https:', 'mailto:'].includes(target.protocol)) return element('span', {}, ...shown);
  return element('a', { href: target.href, target: '_blank', rel: 'noopener noreferrer', title: target.href }, ...shown);
}
