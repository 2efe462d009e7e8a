// Making and changing elements, and numbers as people read them. Text always goes in as text.

/** An element with properties and children; strings become text. */
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [property, value] of Object.entries(properties)) {
    if (property === 'class') node.className = value;
    else if (property in node) node[property] = value;
    else node.setAttribute(property, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Changes a text only where it differs, so that selections and screen readers are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets a progress bar; without a share it only moves. */
export function setProgress(bar, share) {
  if (typeof share === 'number') bar.value = share;
  else bar.removeAttribute('value');
}

const NOTHING = '–';

export function count(number) {
  return typeof number === 'number' ? number.toLocaleString('en') : NOTHING;
}

/** "1 token", "2 tokens". */
export function counted(number, word) {
  return `${count(number)} ${word}${number === 1 ? '' : 's'}`;
}

export function rate(perSecond) {
  if (typeof perSecond !== 'number') return NOTHING;
  return perSecond >= 100 ? count(Math.round(perSecond)) : perSecond.toFixed(1);
}

export function percent(share) {
  return typeof share === 'number' ? `${(share * 100).toFixed(share > 0.999 || share < 0.1 ? 1 : 0)} %` : NOTHING;
}

export function bytes(number) {
  if (typeof number !== 'number') return NOTHING;
  const steps = [['GiB', 2 ** 30, 2], ['MiB', 2 ** 20, 1], ['KiB', 2 ** 10, 1]];
  for (const [unit, size, digits] of steps) {
    if (number >= size) return `${(number / size).toFixed(number >= 100 * size ? 0 : digits)} ${unit}`;
  }
  return `${number} B`;
}

export function seconds(number) {
  if (typeof number !== 'number') return NOTHING;
  if (number < 0.1) return `${Math.round(number * 1000)} ms`;
  if (number < 60) return `${number.toFixed(1)} s`;
  const minutes = Math.floor(number / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(number % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
