'use strict';
// Makes elements and texts, formats numbers, keeps the state of the page in its
// address, and unpacks data. Every text of a run gets into the page as a text
// node, never as markup.

const data = JSON.parse(document.getElementById('data').textContent);

const COLOURS = ['#3f7fd9', '#dc6a2c', '#1f9e78', '#c8559f', '#b98a00',
  '#2fa3c7', '#7c62d6', '#8b8f98', '#d0455a', '#6b9a2b'];
const DASHES = ['', '6 3', '2 3', '9 3 2 3', '1 4', '12 4'];

function colourOf(number) {
  return COLOURS[number % COLOURS.length];
}

// make('p', {class: 'note', onclick: f}, 'text', element, ...): all text gets
// into the page here or in `appendText`.
function make(tag, options, ...children) {
  const isSvg = ['svg', 'path', 'line', 'g', 'rect', 'text', 'circle']
    .includes(tag);
  const element = isSvg
    ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  if (element.title) element.title = visible(element.title);
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : plain(child));
  }
  return element;
}

// Control characters, invisible characters and marks that turn the direction of
// text are shown as escapes, so that no text looks like another text.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

function escapeOf(character) {
  const code = character.codePointAt(0);
  if (character === '\t') return '\\t';
  if (character === '\r') return '\\r';
  const hex = code.toString(16);
  if (code < 256) return '\\x' + hex.padStart(2, '0');
  if (code < 65536) return '\\u' + hex.padStart(4, '0');
  return '\\U' + hex.padStart(8, '0');
}

function appendText(element, text) {
  let start = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match[0] === '\n') continue;
    element.append(text.slice(start, match.index));
    element.append(make('span', {class: 'escape'}, escapeOf(match[0])));
    start = match.index + match[0].length;
  }
  element.append(text.slice(start));
  return element;
}

function visible(text) {
  return String(text).replace(HIDDEN, (c) => (c === '\n' ? c : escapeOf(c)));
}

// Returns the text on one line.
function plain(text) {
  return visible(text).replaceAll('\n', ' ');
}

function number(value, digits) {
  if (value === null || value === undefined) return '–';
  if (digits !== undefined) return value.toFixed(digits);
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// The state of the page is in its address, so that a link to the page shows the
// page in the same state.
const address = {
  values: new URLSearchParams(location.hash.slice(1)),
  get(name, otherwise) {
    const value = this.values.get(name);
    return value === null ? otherwise : value;
  },
  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === '' || value === undefined) {
        this.values.delete(name);
      } else {
        this.values.set(name, String(value));
      }
    }
    history.replaceState(null, '', '#' + this.values.toString());
  },
};

async function unpack(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream()
    .pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).text();
}

// Returns whether an experiment is hidden. A click on an experiment in the bar
// at the top hides it or shows it again.
function isHidden(group) {
  return address.get('hide', '').split(',').includes(String(group));
}

function visibleGroups() {
  return data.groups.map((_, n) => n).filter((n) => !isHidden(n));
}

function groupChip(group) {
  return make('span', {class: 'swatch',
    style: {background: colourOf(group)}});
}
