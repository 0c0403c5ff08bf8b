'use strict';
// The viewer of dialogues: a list that draws only what is visible, filters,
// sorting, and a dialogue with its tokens coloured.

let index = null;  // the columns of all dialogues, and lists of their texts
const ROW = 52;  // pixels of a row of the list
const KEPT_PARTS = 60;  // the most unpacked parts that are kept in memory

async function loadIndex() {
  index = JSON.parse(await unpack(data.index));
  index.count = index.columns.step.length;
  index.ofKey = new Map();
  index.columns.key.forEach((key, n) => {
    if (!index.ofKey.has(key)) index.ofKey.set(key, []);
    index.ofKey.get(key).push(n);
  });
}

// The parts come after this program in the file, so the whole file must be read
// before a part can be found.
const isRead = new Promise((done) => {
  if (document.readyState !== 'loading') done();
  else document.addEventListener('DOMContentLoaded', done);
});

const unpacked = new Map();  // a part's number to the promise of its dialogues

function part(number) {
  let promise = unpacked.get(number);
  if (promise) {
    unpacked.delete(number);  // moves to the end, because it was used last
  } else {
    promise = isRead.then(() => (
      unpack(document.getElementById(`part-${number}`).textContent)))
      .then((text) => (
        text.split('\n').filter((line) => line).map(JSON.parse)));
  }
  unpacked.set(number, promise);
  if (unpacked.size > KEPT_PARTS) unpacked.delete(unpacked.keys().next().value);
  return promise;
}

async function dialogue(n) {
  const records = await part(index.columns.part[n]);
  return records[index.columns.place[n]];
}

function plural(count, noun) {
  const ending = noun.endsWith('h') ? 'es' : 's';
  return `${count} ${noun}${count === 1 ? '' : ending}`;
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function textsOf(record) {
  return [record.question, record.prompt, ...record.golden_answers,
    ...record.turns.flatMap((t) => [t.text, t.observation])]
    .join('\n').toLowerCase();
}

// ---------------------------------------------------------------- the filters

const ORDERS = {
  order: ['as collected', (c, n) => n],
  reward: ['reward', (c, n) => c.reward[n]],
  clipped: ['clipped share', (c, n) => c.clipped[n]],
  spread: ['distance of turn ratios', (c, n) => c.spread[n]],
  searches: ['searches', (c, n) => c.searches[n]],
  turns: ['turns', (c, n) => c.turns[n]],
  tokens: ['tokens', (c, n) => c.tokens[n]],
  step: ['step', (c, n) => c.step[n]],
  question: ['question', (c, n) => index.questions[c.question[n]]],
};

const FILTERS = ['run', 'step', 'kind', 'status', 'least', 'most', 'clip',
  'searches', 'text'];

// Returns the numbers of the dialogues that pass all filters but the text.
function filtered() {
  const c = index.columns;
  const get = (name) => address.get(name, '');
  const limit = (name, otherwise) => (
    get(name) === '' ? otherwise : Number(get(name)));
  const run = limit('run', null);
  const step = limit('step', null);
  // Only dialogues of training have coloured tokens, so these are shown first.
  const kind = get('kind') === 'all' || !c.kind.includes(0) ? null
    : limit('kind', 0);
  const status = get('status');
  const least = limit('least', -Infinity);
  const most = limit('most', Infinity);
  const clip = limit('clip', null);
  const searches = limit('searches', null);
  const found = [];
  for (let n = 0; n < index.count; n++) {
    if (run !== null && c.run[n] !== run) continue;
    if (isHidden(data.runs[c.run[n]].group)) continue;
    if (step !== null && c.step[n] !== step) continue;
    if (kind !== null && c.kind[n] !== kind) continue;
    if (status && index.statuses[c.status[n]] !== status) continue;
    if (c.reward[n] < least || c.reward[n] > most) continue;
    if (clip !== null && !(c.clipped[n] !== null
      && c.clipped[n] * 100 >= clip)) continue;
    if (searches !== null && c.searches[n] !== searches) continue;
    found.push(n);
  }
  return found;
}

function sorted(numbers) {
  const [, value] = ORDERS[address.get('sort', 'order')] || ORDERS.order;
  const sign = address.get('down', '') ? -1 : 1;
  const c = index.columns;
  return numbers.sort((a, b) => {
    const [x, y] = [value(c, a), value(c, b)];
    if (x === y) return a - b;
    // Dialogues without a value come last in both directions.
    if (x === null) return 1;
    if (y === null) return -1;
    return sign * (x < y ? -1 : 1);
  });
}

let search = 0;  // the number of the newest search

// Shows the dialogues among `numbers` that contain the text. The parts of all
// these numbers are unpacked one after the other, and after every 50 parts the
// dialogues found so far are shown.
async function searchText(numbers, text, show) {
  const mine = ++search;
  const wanted = text.toLowerCase();
  const byPart = new Map();
  for (const n of numbers) {
    const p = index.columns.part[n];
    if (!byPart.has(p)) byPart.set(p, []);
    byPart.get(p).push(n);
  }
  const found = [];
  let done = 0;
  for (const [p, members] of byPart) {
    const records = await part(p);
    if (mine !== search) return;
    for (const n of members) {
      const record = records[index.columns.place[n]];
      if (textsOf(record).includes(wanted)) found.push(n);
    }
    done += 1;
    if (done % 50 === 0) show(found.slice(), done / byPart.size);
  }
  show(found, 1);
}

// ------------------------------------------------------------------- colours

const MEASURES = {
  none: ['none', null],
  ratio: ['token ratio', (t, i) => t.ratio && t.ratio[i]],
  turn_ratio: ['turn ratio', (t) => t.turn_ratio],
  advantage: ['advantage', (t, i) => t.advantage && t.advantage[i]],
  value: ['value', (t, i) => t.value && t.value[i]],
  entropy: ['entropy', (t, i) => t.entropy && t.entropy[i]],
  clipped: ['clipped', (t, i) => (t.cut.has(i) ? 1 : 0)],
  silenced: ['silenced', (t, i) => (t.weight ? 1 - t.weight[i] : 0)],
};
const DIVERGING = ['ratio', 'turn_ratio', 'advantage'];

// Ratios are coloured by their logarithm: 1 has no colour.
function shade(name, value) {
  if (value === null || value === undefined) return null;
  if (name === 'ratio' || name === 'turn_ratio') return Math.log(value);
  return value;
}

function scaleOf(name, record) {
  const values = [];
  for (const turn of record.turns) {
    if (!turn.tokens) continue;
    turn.tokens.characters.forEach((_, i) => {
      const value = shade(name, MEASURES[name][1](turn.tokens, i));
      if (value !== null && Number.isFinite(value)) values.push(value);
    });
  }
  if (!values.length) return null;
  if (name === 'clipped' || name === 'silenced') return [0, 1];
  const largest = Math.max(...values.map(Math.abs));
  if (DIVERGING.includes(name)) {
    const most = Math.max(largest, 1e-6);
    return [-most, most];
  }
  const low = Math.min(0, ...values);
  const high = Math.max(...values);
  return [low, high > low ? high : low + 1];
}

function background(name, value, scale) {
  const v = shade(name, value);
  if (v === null || !scale || !Number.isFinite(v)) return '';
  const share = Math.min(Math.max((v - scale[0]) / (scale[1] - scale[0]), 0), 1);
  if (DIVERGING.includes(name)) {
    const strength = Math.abs(share - 0.5) * 2;
    const tone = share > 0.5 ? '222, 96, 38' : '52, 120, 222';
    return `rgba(${tone}, ${(strength * 0.75).toFixed(3)})`;
  }
  const tone = name === 'clipped' ? '214, 52, 84'
    : name === 'silenced' ? '120, 84, 214' : '24, 148, 110';
  return `rgba(${tone}, ${(share * 0.75).toFixed(3)})`;
}

function available(record) {
  const tokens = record.turns.map((t) => t.tokens).filter((t) => t);
  return Object.keys(MEASURES).filter((name) => name === 'none'
    || tokens.some((t) => t.characters.some((_, i) => {
      const value = MEASURES[name][1](t, i);
      return value !== null && value !== undefined;
    })));
}

function legend(name, record) {
  const scale = name === 'none' ? null : scaleOf(name, record);
  if (!scale) return null;
  const back = name === 'ratio' || name === 'turn_ratio' ? Math.exp : (v) => v;
  const stops = [];
  for (let i = 0; i <= 10; i++) {
    const v = scale[0] + (scale[1] - scale[0]) * i / 10;
    stops.push(background(name, back(v), scale));
  }
  return make('span', {class: 'scale'}, number(back(scale[0])),
    make('i', {style: {background: `linear-gradient(90deg, ${stops.join()})`}}),
    number(back(scale[1])));
}

// ------------------------------------------------------------ one dialogue

function prepare(record) {
  for (const turn of record.turns) {
    const t = turn.tokens;
    if (!t) continue;
    // A record that is damaged is shown without the numbers of its tokens.
    if (!Array.isArray(t.characters)) turn.tokens = null;
    else t.cut = new Set(list(t.clipped));
  }
  return record;
}

function tokenSpans(turn, name, scale) {
  const letters = Array.from(turn.text);
  const spans = [];
  let start = 0;
  turn.tokens.characters.forEach((count, i) => {
    const text = letters.slice(start, start + count).join('');
    start += count;
    const value = name === 'none' ? null : MEASURES[name][1](turn.tokens, i);
    const span = make('span', {class: 'token', style: {
      backgroundColor: background(name, value, scale)}});
    span.numbers = [turn.tokens, i, text];
    if (turn.tokens.cut.has(i)) span.classList.add('cut');
    if (turn.tokens.weight && turn.tokens.weight[i] === 0) {
      span.classList.add('zero');
    }
    spans.push(appendText(span, text));
  });
  const rest = letters.slice(start).join('');
  if (rest) spans.push(appendText(make('span', {}), rest));
  return spans;
}

function numbersOf(t, i) {
  const pick = (name) => (t[name] ? t[name][i] : undefined);
  const probability = (logprob) => (
    logprob === null || logprob === undefined ? null : Math.exp(logprob));
  const old = pick('old_logprob');
  return [
    ['token ratio', pick('ratio')],
    ['turn ratio', t.turn_ratio],
    ['old probability', probability(old)],
    ['old log-probability', old],
    ['advantage', pick('advantage')],
    ['value', pick('value')],
    ['entropy', pick('entropy')],
    ['clipped', t.cut.has(i) ? 'yes' : 'no'],
    ['weight of the corrections', t.weight ? t.weight[i] : 1],
  ].filter(([, value]) => value !== undefined);
}

function showTip(event) {
  const tip = document.getElementById('tip');
  const token = event.target.closest ? event.target.closest('.token') : null;
  tip.hidden = !token;
  if (!token) return;
  const [t, i, text] = token.numbers;
  tip.replaceChildren(make('b', {}, `token ${i + 1}: `, make('code', {},
    JSON.stringify(text))),
  make('table', {}, numbersOf(t, i).map(([name, value]) => (
    make('tr', {}, make('th', {}, name), make('td', {},
      typeof value === 'string' ? value : number(value)))))));
  const box = token.getBoundingClientRect();
  const width = tip.offsetWidth;
  const below = box.bottom + tip.offsetHeight + 8 < window.innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, window.innerWidth - width
    - 8))}px`;
  tip.style.top = `${below ? box.bottom + 6
    : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}

function badge(text, kind) {
  return make('span', {class: `badge ${kind || ''}`}, text);
}

function rewardBadge(reward) {
  const kind = reward > 0.999 ? 'high' : reward > 0 ? 'some' : 'none';
  return make('span', {class: `badge reward ${kind}`}, number(reward, 2));
}

function where(n) {
  const c = index.columns;
  const run = data.runs.length > 1 ? `${data.runs[c.run[n]].name}, ` : '';
  return `${run}${stepOf(n)}, dialogue ${c.place[n] + 1}`;
}

function stepOf(n) {
  const c = index.columns;
  return `${c.kind[n] ? 'evaluation at ' : ''}step ${c.step[n]}`;
}

// Returns the name of a dialogue in the address of the page.
function nameOf(n) {
  const c = index.columns;
  return `${c.run[n]}.${c.step[n]}.${c.place[n]}${c.kind[n] ? '.e' : ''}`;
}

function turnBlock(turn, number_, name, scale) {
  const t = turn.tokens;
  const words = [`turn ${number_}`];
  const badges = [badge(turn.action || '', turn.action === 'invalid' ? 'bad'
    : '')];
  if (turn.reward) badges.push(badge(`reward ${number(turn.reward)}`));
  if (t) {
    words.push(plural(t.characters.length, 'token'));
    badges.push(badge(`ratio ${number(t.turn_ratio)}`));
    if (t.cut.size) badges.push(badge(`${t.cut.size} clipped`, 'bad'));
  }
  const body = make('div', {class: 'text', dir: 'auto'});
  if (t) body.append(...tokenSpans(turn, name, scale));
  else appendText(body, turn.text);
  return [
    make('article', {class: 'turn'}, make('header', {}, words.join(' · '),
      badges), body),
    turn.observation ? make('article', {class: 'observation'},
      make('header', {}, 'observation'),
      appendText(make('div', {class: 'text', dir: 'auto'}),
        turn.observation.replace(/^\n+|\n+$/g, '')))
      : null,
  ];
}

function scores(record) {
  const terms = [...Object.entries(record.rewards || {}).map(([k, v]) => (
    [`reward ${k}`, v])), ...Object.entries(record.scores || {})];
  return make('div', {class: 'terms'}, terms.map(([name, value]) => (
    make('span', {}, name, ' ', make('b', {}, number(value))))));
}

function dialogueView(n, record, name) {
  const c = index.columns;
  const scale = name === 'none' ? null : scaleOf(name, record);
  const golden = record.golden_answers.join(' | ');
  const prompt = make('details', {class: 'prompt'},
    make('summary', {}, 'prompt'),
    appendText(make('div', {class: 'text', dir: 'auto'}),
      record.prompt));
  return make('div', {class: 'dialogue', 'data-number': n},
    make('div', {class: 'where'}, groupChip(data.runs[c.run[n]].group),
      where(n), rewardBadge(c.reward[n]),
      badge(index.statuses[c.status[n]],
        index.statuses[c.status[n]] === 'completed' ? '' : 'bad')),
    appendText(make('h2', {class: 'question', dir: 'auto'}),
      record.question),
    make('p', {class: 'golden'}, 'golden: ', make('b', {}, golden)),
    scores(record),
    record.cause ? make('p', {class: 'notes'}, record.cause) : null,
    prompt, record.turns.map((turn, i) => (
      turnBlock(turn, i + 1, name, scale))));
}

// ---------------------------------------------------------------- the viewer

function viewer() {
  if (!index.count) {
    return [showNotes(), make('p', {class: 'empty'},
      'The runs have written no dialogues (writer.trajectories, '
      + 'writer.evaluation).')];
  }
  const c = index.columns;
  const state = {shown: [], place: 0};
  const box = make('div', {id: 'list', tabindex: 0, role: 'listbox',
    'aria-label': 'dialogues'});
  const space = make('div', {class: 'space'});
  box.append(space);
  const detail = make('div', {id: 'detail'});
  const count = make('span', {id: 'count', role: 'status'});

  const field = (name, element, title) => {
    element.value = address.get(name, '');
    element.id = `filter-${name}`;
    element.title = title;
    element.addEventListener(element.tagName === 'SELECT' ? 'change' : 'input',
      () => {
        address.set({[name]: element.value});
        apply();
      });
    return element;
  };
  const choices = (pairs) => make('select', {}, pairs.map(([value, title]) => (
    make('option', {value}, title))));
  const numberField = (name, hint, title, options) => field(name, make('input',
    {type: 'number', placeholder: hint, step: 'any', ...options}), title);
  const steps = [...new Set(c.step)].sort((a, b) => a - b);
  const controls = make('div', {class: 'controls filters'},
    data.runs.length > 1 ? field('run', choices([['', 'all runs'],
      ...data.runs.map((run, n) => [String(n), run.name])]), 'run') : null,
    field('step', choices([['', 'all steps'], ...steps.map((step) => (
      [String(step), `step ${step}`]))]), 'step'),
    c.kind.some((kind) => kind !== c.kind[0]) ? field('kind', choices([
      ['', 'training'], ['1', 'evaluation'],
      ['all', 'training and evaluation']]), 'what the dialogue was for') : null,
    field('status', choices([['', 'any ending'], ...index.statuses.map((s) => (
      [s, s]))]), 'how the dialogue ended'),
    numberField('least', 'reward ≥', 'least reward'),
    numberField('most', 'reward ≤', 'largest reward'),
    numberField('clip', 'clipped % ≥', 'least share of clipped tokens',
      {min: 0, max: 100}),
    numberField('searches', 'searches =', 'number of searches', {min: 0}),
    field('text', make('input', {type: 'search', placeholder:
      'text in questions, turns, observations'}), 'press / to go here'),
    field('sort', choices(Object.entries(ORDERS).map(([key, [title]]) => (
      [key === 'order' ? '' : key, `by ${title}`.replace('by as', 'as')]))),
    'order'),
    make('button', {id: 'direction', class: 'quiet', title: 'turn the order',
      onclick: () => {
        address.set({down: address.get('down', '') ? null : '1'});
        apply();
      }}, '↑↓'),
    make('button', {id: 'clear', class: 'quiet', onclick: () => {
      address.set(Object.fromEntries(FILTERS.map((name) => [name, null])));
      for (const name of FILTERS) {
        const element = document.getElementById(`filter-${name}`);
        if (element) element.value = '';
      }
      apply();
    }}, 'clear'));

  const row = (place) => {
    const n = state.shown[place];
    const facts = [stepOf(n), plural(c.turns[n], 'turn'),
      plural(c.searches[n], 'search')];
    if (c.clipped[n] !== null) {
      facts.push(`${(c.clipped[n] * 100).toFixed(1)} % clipped`);
    }
    const status = index.statuses[c.status[n]];
    return make('div', {class: 'row' + (place === state.place ? ' on' : ''),
      role: 'option', id: `row-${n}`, 'data-number': n,
      'aria-selected': String(place === state.place),
      style: {top: `${place * ROW}px`}, onclick: () => select(place)},
    rewardBadge(c.reward[n]),
    make('div', {class: 'title'}, index.questions[c.question[n]]),
    make('div', {class: 'facts'}, groupChip(data.runs[c.run[n]].group),
      facts.join(' · '), status === 'completed' ? null : badge(status, 'bad')));
  };
  const drawList = () => {
    const first = Math.max(Math.floor(box.scrollTop / ROW) - 4, 0);
    const last = Math.min(first + Math.ceil(box.clientHeight / ROW) + 8,
      state.shown.length);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(row(place));
    space.style.height = `${state.shown.length * ROW}px`;
    space.replaceChildren(...rows);
    if (state.shown.length) {
      box.setAttribute('aria-activedescendant',
        `row-${state.shown[state.place]}`);
    }
  };
  let drawing = 0;
  box.addEventListener('scroll', () => {
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(drawList);
  });

  let newest = 0;
  const drawDetail = async () => {
    const mine = ++newest;
    const n = state.shown[state.place];
    if (n === undefined) {
      detail.replaceChildren(make('p', {class: 'empty'},
        'No dialogue passes these filters.'));
      return;
    }
    const chosen = address.get('colour', 'ratio');
    const same = index.ofKey.get(c.key[n]);
    const compares = address.get('compare', '') === '1';
    const numbers = compares ? same.slice().sort((a, b) => (
      c.step[a] - c.step[b] || a - b)) : [n];
    const near = numbers.length > 40 ? around(numbers, n, 40) : numbers;
    const records = await Promise.all(near.map(async (m) => (
      prepare(await dialogue(m)))));
    if (mine !== newest) return;
    const own = records[near.indexOf(n)];
    const measures = available(own);
    const name = measures.includes(chosen) ? chosen : 'none';
    const colours = make('div', {id: 'colours', role: 'radiogroup',
      'aria-label': 'colour of tokens'}, measures.map((key) => make('button', {
      role: 'radio', 'aria-checked': String(key === name), 'data-colour': key,
      class: key === name ? 'on' : '', onclick: () => {
        address.set({colour: key});
        drawDetail();
      }}, MEASURES[key][0])));
    const tools = make('div', {class: 'controls tools'},
      make('button', {class: 'quiet', title: 'k', onclick: () => (
        select(state.place - 1))}, '‹ previous'),
      make('button', {class: 'quiet', title: 'j', onclick: () => (
        select(state.place + 1))}, 'next ›'),
      make('button', {id: 'compare', class: 'quiet' + (compares ? ' on' : ''),
        title: 'c', 'aria-pressed': String(compares), disabled:
        same.length < 2, onclick: toggleCompare},
      `same question, ${same.length}×`),
      measures.length > 1 ? [make('span', {class: 'dim'}, 'colour'), colours,
        legend(name, own)] : make('span', {class: 'dim'},
        'no numbers of tokens are recorded for this dialogue'));
    const views = near.map((m, i) => dialogueView(m, records[i], name));
    const place = near.indexOf(n);
    if (compares) views[place].classList.add('current');
    detail.replaceChildren(tools, compares
      ? make('div', {class: 'columns'}, views) : views[0]);
    if (compares) {
      const columns = detail.querySelector('.columns');
      for (const scrolls of [detail, columns]) {
        scrolls.scrollLeft = views[place].offsetLeft - columns.offsetLeft;
      }
    }
    detail.dataset.number = n;
  };
  const toggleCompare = () => {
    const on = address.get('compare', '') === '1';
    address.set({compare: on ? null : '1'});
    drawDetail();
  };
  const select = (place, keep) => {
    state.place = Math.max(0, Math.min(place, state.shown.length - 1));
    const n = state.shown[state.place];
    if (n !== undefined && !keep) {
      address.set({d: nameOf(n)});
    }
    const top = state.place * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + ROW > box.scrollTop + box.clientHeight) {
      box.scrollTop = top + ROW - box.clientHeight;
    }
    drawList();
    detail.scrollTop = 0;
    drawDetail();
  };

  // The dialogue that the address names stays selected if it is still shown.
  const show = (numbers, share) => {
    state.shown = sorted(numbers);
    const wanted = address.get('d', '');
    const place = state.shown.findIndex((n) => nameOf(n) === wanted);
    count.textContent = `${state.shown.length.toLocaleString('en')} of ${
      index.count.toLocaleString('en')} dialogues`
      + (share < 1 ? `, searching ${Math.round(share * 100)} %` : '');
    box.scrollTop = 0;
    select(Math.max(place, 0), true);
  };
  let waiting = 0;
  const apply = () => {
    clearTimeout(waiting);
    search += 1;  // ends an older search
    const text = address.get('text', '').trim();
    const numbers = filtered();
    document.getElementById('direction')?.classList.toggle('on',
      Boolean(address.get('down', '')));
    if (!text) {
      show(numbers, 1);
      return;
    }
    count.textContent = 'searching';
    waiting = setTimeout(() => searchText(numbers, text, show), 120);
  };

  keys = (event) => {
    const typing = ['INPUT', 'SELECT', 'TEXTAREA'].includes(
      event.target.tagName);
    if (event.key === 'Escape' && typing) {
      event.target.blur();
      box.focus();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(Math.floor(box.clientHeight / ROW) - 1, 1);
    const moves = {j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: page,
      PageUp: -page, Home: -Infinity, End: Infinity};
    if (event.key in moves) {
      const to = state.place + moves[event.key];
      select(Math.min(Math.max(to, 0), state.shown.length - 1));
    } else if (event.key === '/') {
      document.getElementById('filter-text').focus();
    } else if (event.key === 'c') {
      toggleCompare();
    } else if (/^[1-8]$/.test(event.key)) {
      const buttons = detail.querySelectorAll('#colours button');
      const button = buttons[Number(event.key) - 1];
      if (button) button.click();
    } else {
      return;
    }
    event.preventDefault();
  };
  detail.addEventListener('pointerover', showTip);
  detail.addEventListener('pointerleave', () => {
    document.getElementById('tip').hidden = true;
  });
  requestAnimationFrame(apply);
  return [showNotes(), controls, make('div', {class: 'viewer'},
    make('div', {class: 'left'}, make('div', {class: 'counted'}, count,
      make('span', {class: 'dim'}, 'keys: j k / c 1–8')), box), detail)];
}

// Returns `count` of the sorted numbers, around the number n.
function around(numbers, n, count) {
  const place = numbers.indexOf(n);
  const start = Math.min(Math.max(place - Math.floor(count / 2), 0),
    numbers.length - count);
  return numbers.slice(start, start + count);
}

let keys = () => {};  // handles keys in the viewer that is shown
document.addEventListener('keydown', (event) => {
  if (document.getElementById('list')) keys(event);
});
