'use strict';
// The tabs of the page.

const THEMES = {auto: '◐ auto', light: '☀ light', dark: '☾ dark'};

function showNotes() {
  if (!data.notes.length) return null;
  return make('div', {class: 'notes', role: 'note'}, data.notes.map((note) => (
    make('p', {}, note))));
}

function overview() {
  const learning = data.sections.find((s) => s.title === 'Learning');
  return [
    showNotes(),
    section('Runs', '', runTable()),
    learning ? make('div', {class: 'figures'},
      learning.panels.slice(0, 3).map(figureOf)) : null,
    ...Object.entries(data.tables).map(([title, rows]) => (
      section(title, '', textTable(rows)))),
    section('Summary', data.runs.length > data.groups.length
      ? 'Means over seeds, with the least and the largest value.' : '',
    summaryTable()),
    section('Alarms', 'Steps in which a metric said that something was wrong.',
      alarmTable()),
    data.evaluation.length ? section('Evaluation',
      'The last evaluation, and the best one.', evaluationTable()) : null,
    section('Clipping by turn', 'Share of policy tokens whose ratio is outside '
      + `the bounds, of all steps. Bars of fewer than ${fewTokens} tokens are `
      + 'hatched: they say little.', turnBars()),
    section('Time by phase', 'Of all steps together.', phaseBars()),
  ];
}

function curves() {
  const window_ = make('select', {id: 'smooth'}, [1, 5, 10, 20, 50].map((n) => (
    make('option', {value: n}, n === 1 ? 'no smoothing' : `mean of ${n} points`))));
  window_.value = address.get('smooth', '1');
  window_.addEventListener('change', () => {
    address.set({smooth: window_.value === '1' ? null : window_.value});
    drawFigures();
  });
  const jump = data.sections.map((s) => make('a', {href: '#', onclick:
    (event) => {
      event.preventDefault();
      document.querySelector(`[data-section="${s.title}"]`).scrollIntoView();
    }}, s.title));
  const own = ownPanel();
  return [
    make('div', {class: 'controls sticky'}, window_,
      make('button', {class: 'quiet', onclick: () => setRange(null)},
        'all steps'), make('span', {class: 'jump'}, jump),
      make('span', {class: 'dim hint'}, 'drag to zoom, double-click to reset')),
    ...data.sections.map((s) => section(s.title, '',
      make('div', {class: 'figures'}, s.panels.map(figureOf)))),
    section('Any metric', 'Every name of metrics.jsonl.', own),
  ];
}

// Makes a figure of a metric that the reader names.
function ownPanel() {
  const names = [...new Set(metricsOfRun.flatMap((m) => (
    Object.keys(m.columns))))].sort();
  const list = make('datalist', {id: 'metrics'}, names.map((name) => (
    make('option', {value: name}))));
  const input = make('input', {type: 'search', list: 'metrics', size: 40,
    placeholder: 'name of a metric', value: address.get('metric', '')});
  const place = make('div', {class: 'figures'});
  const draw = () => {
    if (input.value && !names.includes(input.value)) return;
    address.set({metric: input.value});
    place.replaceChildren(...(input.value ? [figureOf({title: input.value,
      metrics: [input.value], note: '', line: ''})] : []));
  };
  input.addEventListener('input', draw);
  draw();
  return make('div', {}, make('div', {class: 'controls'}, input, list), place);
}

// Shows the pictures that another command has added to the page.
function pictures() {
  return Object.entries(data.pictures).map(([name, source]) => (
    section(name, '', make('img', {src: source, alt: name}))));
}

const TABS = {
  overview: ['Overview', overview],
  curves: ['Curves', curves],
  dialogues: ['Dialogues', viewer],
  config: ['Configuration', () => [configTable()]],
  ...(Object.keys(data.pictures).length
    ? {pictures: ['Pictures', pictures]} : {}),
};

function showTab() {
  const chosen = address.get('tab', 'overview');
  const name = TABS[chosen] ? chosen : 'overview';
  forgetFigures();
  document.getElementById('tabs').replaceChildren(...Object.entries(TABS).map(
    ([key, [title]]) => make('button', {role: 'tab', id: `tab-${key}`,
      'aria-selected': String(key === name), onclick: () => {
        address.set({tab: key});
        showTab();
      }}, title)));
  showLegend();
  const main = document.getElementById('main');
  main.className = name;
  main.replaceChildren(...TABS[name][1]().flat().filter((x) => x));
}

function showLegend() {
  document.getElementById('legend').replaceChildren(...data.groups.map(
    (label, group) => {
      const seeds = runsOf(group).length;
      const title = seeds > 1 ? `${label} (${seeds} seeds)` : label;
      return make('button', {class: 'key' + (isHidden(group) ? ' off' : ''),
        'aria-pressed': String(!isHidden(group)), title: title,
        onclick: () => {
          const hidden = data.groups.map((_, n) => n).filter((n) => (
            isHidden(n) !== (n === group)));
          address.set({hide: hidden.join(',')});
          showTab();
        }}, groupChip(group), title);
    }));
}

function showTheme() {
  const theme = address.get('theme', 'auto');
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById('theme');
  button.textContent = THEMES[theme] || THEMES.auto;
}

document.getElementById('theme').addEventListener('click', () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(address.get('theme', 'auto')) + 1)
    % names.length];
  address.set({theme: next === 'auto' ? null : next});
  showTheme();
});

window.addEventListener('hashchange', () => {
  address.values = new URLSearchParams(location.hash.slice(1));
  showTheme();
  showTab();
});

async function start() {
  document.title = data.groups.map(plain).join(', ') + ' – report';
  showTheme();
  await Promise.all([loadMetrics(), loadIndex()]);
  showTab();
  document.documentElement.dataset.ready = 'true';
}

start().catch((error) => {
  document.getElementById('main').replaceChildren(make('p', {class: 'notes'},
    `This browser cannot show the page: ${error.message}`));
  throw error;
});
