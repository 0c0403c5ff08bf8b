'use strict';
// The overview: runs, summary, alarms, evaluation, time by phase, clipping by
// turn; and the table of the configuration.

function cell(content, options) {
  return make('td', options || {}, content);
}

function spreadText(spread, digits) {
  if (!spread) return '–';
  const mean = number(spread.mean, digits);
  if (spread.count < 2) return mean;
  return [mean, make('small', {},
    ` [${number(spread.min, digits)}, ${number(spread.max, digits)}]`)];
}

function head(titles) {
  return make('thead', {}, make('tr', {}, titles.map((title) => (
    make('th', {}, title)))));
}

function groupHead(first, groups, ...more) {
  return head([first, ...groups.map((g) => (
    [groupChip(g), data.groups[g]])), ...more]);
}

function scroller(table) {
  return make('div', {class: 'scroll'}, table);
}

function section(title, note, ...content) {
  return make('section', {'data-section': title}, make('h2', {}, title),
    note ? make('p', {class: 'note'}, note) : null, ...content);
}

// Makes a table of texts, such as a table of a study. The first row is the
// heading.
function textTable([titles, ...rows]) {
  return scroller(make('table', {}, head(titles), make('tbody', {},
    rows.map((row) => make('tr', {}, row.map((text) => cell(text)))))));
}

function runTable() {
  const rows = data.runs.map((run, n) => {
    const done = run.num_steps ? run.step / run.num_steps : 1;
    return make('tr', {},
      cell([groupChip(run.group), run.name], {class: 'num'}),
      cell(run.seed === null ? '–' : run.seed),
      cell(make('span', {class: `state ${run.state}`}, run.state)),
      cell([make('span', {class: 'meter'}, make('i', {style: {width:
        `${Math.min(done, 1) * 100}%`}})),
        ` ${run.step}${run.num_steps ? ' / ' + run.num_steps : ''}`],
      {class: 'num'}),
      cell(make('a', {href: '#', onclick: (event) => {
        event.preventDefault();
        address.set({tab: 'dialogues', run: n, step: null, d: null});
        showTab();
      }}, 'dialogues')),
      cell(run.note, {class: 'dim'}));
  });
  return scroller(make('table', {}, head(['run', 'seed', 'state', 'steps', '',
    '']), make('tbody', {}, rows)));
}

function summaryTable() {
  const groups = visibleGroups();
  const rows = data.summary.map((row) => (
    make('tr', {'data-row': row.name},
      make('th', {scope: 'row', title: row.note}, row.name),
      groups.map((g) => cell(spreadText(row.groups[g], row.digits),
        {class: 'num', title: runsOf(g).map((r) => `${data.runs[r].name}: ${
          number(row.runs[r], row.digits)}`).join('\n')})),
      cell(row.note, {class: 'dim explain'}))));
  return scroller(make('table', {id: 'summary'}, groupHead('', groups, ''),
    make('tbody', {}, rows)));
}

function stepsText(steps) {
  const ranges = [];
  for (const step of steps) {
    const last = ranges[ranges.length - 1];
    if (last && step === last[1] + 1) last[1] = step;
    else ranges.push([step, step]);
  }
  const words = ranges.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  const more = words.length - 12;
  return words.slice(0, 12).join(', ') + (more > 0 ? ` and ${more} more` : '');
}

function alarmTable() {
  const shown = data.alarms.filter((a) => !isHidden(data.runs[a.run].group));
  if (!shown.length) {
    return make('p', {class: 'good'}, 'No alarm in any step.');
  }
  const rows = shown.map((alarm) => make('tr', {},
    cell([groupChip(data.runs[alarm.run].group),
      data.runs[alarm.run].name]),
    cell(alarm.name), cell(String(alarm.steps.length), {class: 'num'}),
    cell(stepsText(alarm.steps)),
    cell(number(alarm.worst), {class: 'num'})));
  return scroller(make('table', {id: 'alarms'}, head(['run', 'metric', 'steps',
    'which', 'largest']), make('tbody', {}, rows)));
}

function evaluationTable() {
  const groups = visibleGroups();
  const rows = data.evaluation.map((row) => make('tr', {'data-row': row.name},
    make('th', {scope: 'row'}, row.name),
    groups.map((g) => cell([spreadText(row.last[g], 3),
      make('div', {class: 'dim'}, 'best ', spreadText(row.best[g], 3))],
    {class: 'num'}))));
  return scroller(make('table', {id: 'evaluation'},
    groupHead('metric', groups), make('tbody', {}, rows)));
}

// Draws a bar for each run, with the time of each phase of the run.
function phaseBars() {
  const phases = [...new Set(data.phases.flatMap((p) => Object.keys(p)))];
  const keys = phases.map((phase, n) => make('span', {class: 'value'},
    make('span', {class: 'swatch', style: {background: colourOf(n)}}), phase));
  const bars = data.runs.map((run, n) => {
    if (isHidden(run.group)) return null;
    const total = Object.values(data.phases[n]).reduce((a, b) => a + b, 0);
    const parts = phases.map((phase, p) => {
      const seconds = data.phases[n][phase] || 0;
      const share = total ? seconds / total : 0;
      return make('i', {style: {width: `${share * 100}%`,
        background: colourOf(p)}, 'data-phase': phase,
      title: `${phase}: ${number(seconds)} s, ${(share * 100).toFixed(1)} %`},
      share > 0.08 ? `${Math.round(share * 100)} %` : '');
    });
    return make('div', {class: 'phases'},
      make('span', {class: 'name'}, run.name),
      make('span', {class: 'parts'}, parts));
  });
  return make('div', {class: 'card'}, make('div', {class: 'keys'}, keys), bars);
}

// Draws the share of tokens outside the bounds in turn 1, 2, and so on, with a
// bar for each experiment. The tokens of all seeds of an experiment count
// together. Few tokens are no evidence, so a bar of fewer than `fewTokens`
// tokens is hatched.
const fewTokens = 30;
function turnBars() {
  const levels = ['token', 'turn', 'sentence', 'sequence'].filter((level) => (
    data.by_turn.some((run) => run[level])));
  return make('div', {class: 'figures'}, levels.map((level) => {
    const groups = visibleGroups();
    const turns = new Map();
    for (const group of groups) {
      for (const run of runsOf(group)) {
        for (const [turn, ...found] of data.by_turn[run][level] || []) {
          if (!turns.has(turn)) turns.set(turn, new Map());
          const runs = turns.get(turn);
          if (!runs.has(group)) runs.set(group, []);
          runs.get(group).push(found);
        }
      }
    }
    const sum = (v) => v.reduce((a, b) => a + b, 0);
    const tokensOf = (runs) => sum(runs.map(([, tokens]) => tokens));
    const shareOf = (runs) => (tokensOf(runs)
      ? sum(runs.map(([share, tokens]) => share * tokens)) / tokensOf(runs)
      : sum(runs.map(([share]) => share)) / runs.length);
    const top = Math.max(1e-12, ...[...turns.values()].flatMap((found) => (
      [...found.values()].map(shareOf))));
    const rows = [...turns].sort((a, b) => a[0] - b[0]).map(([turn, found]) => (
      make('div', {class: 'turnrow'}, make('span', {class: 'name'},
        `turn ${turn}`), make('div', {class: 'bars'}, groups.map((group) => {
        if (!found.has(group)) return null;
        const share = shareOf(found.get(group));
        const tokens = tokensOf(found.get(group));
        return make('div', {class: 'bar'}, make('i', {
          class: tokens && tokens < fewTokens ? 'few' : '', style: {
            width: `${share / top * 45}%`, background: colourOf(group)}}),
        make('span', {'data-level': level, 'data-turn': turn,
          'data-group': group}, `${(share * 100).toFixed(2)} % of ${
          tokens ? tokens.toLocaleString('en') : 'unknown'} tokens`));
      })))));
    return make('div', {class: 'card'}, make('h3', {}, `${level} level`), rows);
  }));
}

function configTable() {
  const box = make('div', {});
  const only = make('input', {type: 'checkbox', id: 'only-differences'});
  only.checked = address.get('config', data.groups.length > 1 ? 'differs'
    : 'all') === 'differs';
  const filter = make('input', {type: 'search', placeholder: 'filter keys',
    id: 'config-filter', value: address.get('key', '')});
  const draw = () => {
    address.set({config: only.checked ? 'differs' : 'all', key: filter.value});
    const groups = visibleGroups();
    const differs = new Set(data.differences);
    const rows = data.config.filter(([key]) => key.includes(filter.value)
      && (!only.checked || differs.has(key))).map(([key, values]) => (
      make('tr', {class: differs.has(key) ? 'differs' : ''},
        make('th', {scope: 'row'}, key),
        groups.map((g) => cell(make('code', {}, values[g]))))));
    box.replaceChildren(rows.length
      ? scroller(make('table', {id: 'config'}, groupHead('key', groups),
        make('tbody', {}, rows)))
      : make('p', {class: 'empty'}, 'No key differs or matches.'));
  };
  only.addEventListener('change', draw);
  filter.addEventListener('input', draw);
  draw();
  return section('Configuration',
    'Of one run of each experiment; seeds differ within an experiment.',
    make('div', {class: 'controls'}, filter, make('label', {}, only,
      ' only keys that differ')), box);
}
