'use strict';
// Figures of metrics over steps: lines with bands over seeds. All figures share
// the range of steps that is shown and the step under the pointer.

const metricsOfRun = [];  // {steps, columns} of each run, once unpacked
const figures = new Set();  // the figures that are drawn now

async function loadMetrics() {
  const loaded = await Promise.all(data.metrics.map(unpack));
  metricsOfRun.push(...loaded.map(JSON.parse));
}

function runsOf(group) {
  return data.runs.map((_, n) => n).filter((n) => data.runs[n].group === group);
}

// Returns the mean, the least and the largest value over the seeds of an
// experiment at each step x: [{x, mean, low, high, count}].
function band(group, metric) {
  const values = new Map();
  for (const run of runsOf(group)) {
    const {steps, columns} = metricsOfRun[run];
    const column = columns[metric];
    if (!column) continue;
    column.forEach((value, i) => {
      if (value === null) return;
      if (!values.has(steps[i])) values.set(steps[i], []);
      values.get(steps[i]).push(value);
    });
  }
  const points = [...values].sort((a, b) => a[0] - b[0]);
  return points.map(([x, v]) => ({
    x,
    mean: v.reduce((a, b) => a + b, 0) / v.length,
    low: Math.min(...v),
    high: Math.max(...v),
    count: v.length,
  }));
}

function smooth(points, window) {
  if (window <= 1) return points;
  const sum = {mean: 0, low: 0, high: 0};
  return points.map((point, i) => {
    const old = i >= window ? points[i - window] : null;
    const count = Math.min(i + 1, window);
    const out = {x: point.x, count: point.count};
    for (const key of ['mean', 'low', 'high']) {
      sum[key] += point[key] - (old ? old[key] : 0);
      out[key] = sum[key] / count;
    }
    return out;
  });
}

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / unit); n * unit <= high + unit * 1e-9; n++) {
    found.push(n * unit);
  }
  return found;
}

function xRange() {
  const text = address.get('x', '');
  const range = text.split('-').map(Number);
  if (range.length === 2 && range[1] > range[0]) return range;
  let low = Infinity;
  let high = -Infinity;
  for (const {steps} of metricsOfRun) {
    low = Math.min(low, steps[0]);
    high = Math.max(high, steps[steps.length - 1]);
  }
  return high > low ? [low, high] : [low, low + 1];
}

// Returns the lines that a figure draws: one for each experiment and metric.
function seriesOf(panel, shown) {
  const groups = visibleGroups();
  const several = data.groups.length > 1;
  const found = [];
  panel.metrics.forEach((metric, m) => {
    if (!shown.has(metric)) return;
    for (const group of groups) {
      const points = band(group, metric);
      if (!points.length) continue;
      found.push({
        metric, group, points,
        colour: colourOf(several ? group : m),
        dash: several ? DASHES[m % DASHES.length] : '',
      });
    }
  });
  return found;
}

// Returns the part of each metric's name that differs between the metrics.
function shortNames(metrics) {
  if (metrics.length === 1) return [metrics[0]];
  const parts = metrics.map((name) => name.split('/'));
  let start = 0;
  while (parts.every((p) => p.length > start + 1
    && p[start] === parts[0][start])) start++;
  let end = 0;
  while (parts.every((p) => p.length - end - 1 > start
    && p[p.length - 1 - end] === parts[0][parts[0].length - 1 - end])) end++;
  return parts.map((p) => p.slice(start, p.length - end).join('/')
    .replace(/^turn_/, 'turn '));
}

// The most metrics that a figure shows at first if it compares experiments.
const MOST_METRICS = 2;

class Figure {
  constructor(panel, many) {
    this.panel = panel;
    const few = many ? panel.metrics.slice(0, MOST_METRICS) : panel.metrics;
    this.shown = new Set(few);
    this.logarithmic = false;
    this.names = shortNames(panel.metrics);
    this.plot = make('div', {class: 'plot'});
    this.keys = make('div', {class: 'keys'});
    this.log = make('button', {class: 'quiet small', title:
      'logarithmic axis', onclick: () => {
      this.logarithmic = !this.logarithmic;
      this.draw();
    }}, 'log');
    this.element = make('figure', {class: 'card', 'data-title': panel.title},
      make('figcaption', {}, make('h3', {}, panel.title), this.log,
        make('p', {class: 'note'}, panel.note)),
      this.plot, this.keys);
  }

  draw() {
    const width = Math.max(this.plot.clientWidth, 240);
    const height = 190;
    const window_ = Number(address.get('smooth', '1'));
    this.series = seriesOf(this.panel, this.shown).map((s) => (
      {...s, points: smooth(s.points, window_)}));
    const [x0, x1] = xRange();
    const inside = (p) => p.x >= x0 && p.x <= x1;
    let low = Infinity;
    let high = -Infinity;
    for (const {points} of this.series) {
      for (const point of points.filter(inside)) {
        if (this.logarithmic && point.low <= 0) continue;
        low = Math.min(low, point.low);
        high = Math.max(high, point.high);
      }
    }
    const rules = [...new Set(visibleGroups().map((group) => (
      data.lines[group][this.panel.line])))].filter((v) => v !== undefined);
    if (low <= high) {
      low = Math.min(low, ...rules);
      high = Math.max(high, ...rules);
    }
    this.plot.replaceChildren();
    this.log.classList.toggle('on', this.logarithmic);
    this.drawKeys(null);
    if (!(low <= high)) {
      this.plot.append(make('p', {class: 'empty'}, 'nothing to show'));
      this.scale = null;
      return;
    }
    const scaled = (v) => (this.logarithmic ? Math.log10(v) : v);
    let [a, b] = [scaled(low), scaled(high)];
    const pad = a === b ? Math.abs(a) * 0.1 || 1 : (b - a) * 0.06;
    // An axis that begins near 0 begins at 0.
    const atZero = !this.logarithmic && low >= 0 && low <= 0.35 * high;
    [a, b] = [atZero ? 0 : a - pad, b + pad];
    const left = 46;
    const bottom = 22;
    const top = 6;
    const right = 8;
    const x = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
    const y = (v) => height - bottom
      - (scaled(v) - a) / (b - a) * (height - bottom - top);
    this.scale = {x, left, right, width, x0, x1};

    const svg = make('svg', {width, height, viewBox: `0 0 ${width} ${height}`,
      role: 'img', 'aria-label': this.panel.title});
    const grid = this.logarithmic
      ? ticks(a, b, 4).map((v) => 10 ** v) : ticks(a, b, 4);
    for (const v of grid) {
      svg.append(make('line', {class: 'grid', x1: left, x2: width - right,
        y1: y(v), y2: y(v)}));
      svg.append(make('text', {class: 'tick', x: left - 6, y: y(v) + 3.5,
        'text-anchor': 'end'}, number(Math.abs(v) < 1e-12 ? 0 : v)));
    }
    for (const v of ticks(x0, x1, Math.max(width / 90, 2))) {
      svg.append(make('text', {class: 'tick', x: x(v), y: height - 6,
        'text-anchor': 'middle'}, number(v)));
    }
    for (const level of rules) {
      svg.append(make('line', {class: 'rule', x1: left, x2: width - right,
        y1: y(level), y2: y(level)}));
    }
    for (const s of this.series) {
      const points = s.points.filter((p) => inside(p)
        && (!this.logarithmic || p.low > 0));
      if (points.some((p) => p.high > p.low)) {
        const there = points.map((p) => `${x(p.x)},${y(p.high)}`);
        const back = points.map((p) => `${x(p.x)},${y(p.low)}`).reverse();
        svg.append(make('path', {class: 'band', fill: s.colour,
          d: 'M' + there.join('L') + 'L' + back.join('L') + 'Z'}));
      }
    }
    for (const s of this.series) {
      const points = s.points.filter((p) => inside(p)
        && (!this.logarithmic || p.mean > 0));
      if (!points.length) continue;
      svg.append(make('path', {class: 'curve', stroke: s.colour,
        'stroke-dasharray': s.dash || null,
        d: 'M' + points.map((p) => `${x(p.x)},${y(p.mean)}`).join('L')}));
      if (points.length < 30) {
        for (const p of points) {
          svg.append(make('circle', {cx: x(p.x), cy: y(p.mean), r: 2,
            fill: s.colour}));
        }
      }
    }
    this.cross = make('line', {class: 'cross', y1: top, y2: height - bottom,
      visibility: 'hidden'});
    this.brush = make('rect', {class: 'brush', y: top,
      height: height - bottom - top, visibility: 'hidden'});
    svg.append(this.brush, this.cross);
    this.listen(svg);
    this.plot.append(svg);
  }

  listen(svg) {
    let start = null;
    const stepAt = (event) => {
      const {left, right, width, x0, x1} = this.scale;
      const px = event.clientX - svg.getBoundingClientRect().left;
      const share = (px - left) / (width - left - right);
      return x0 + Math.min(Math.max(share, 0), 1) * (x1 - x0);
    };
    svg.addEventListener('pointermove', (event) => {
      hover(stepAt(event));
      if (start === null) return;
      const ends = [start, stepAt(event)].sort((p, q) => p - q);
      this.brush.setAttribute('visibility', 'visible');
      this.brush.setAttribute('x', this.scale.x(ends[0]));
      this.brush.setAttribute('width',
        this.scale.x(ends[1]) - this.scale.x(ends[0]));
    });
    svg.addEventListener('pointerleave', () => hover(null));
    svg.addEventListener('pointerdown', (event) => {
      start = stepAt(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener('pointerup', (event) => {
      const ends = [start, stepAt(event)].sort((p, q) => p - q);
      start = null;
      this.brush.setAttribute('visibility', 'hidden');
      const wide = (ends[1] - ends[0]) / (this.scale.x1 - this.scale.x0);
      if (wide > 0.02) setRange(`${Math.floor(ends[0])}-${Math.ceil(ends[1])}`);
    });
    svg.addEventListener('dblclick', () => setRange(null));
  }

  hover(step) {
    if (!this.scale) return;
    this.cross.setAttribute('visibility', step === null ? 'hidden' : 'visible');
    if (step !== null) {
      this.cross.setAttribute('x1', this.scale.x(step));
      this.cross.setAttribute('x2', this.scale.x(step));
    }
    this.drawKeys(step);
  }

  // Draws the legend, with values at the step under the pointer. If there is no
  // such step and the figure has one metric, the last values are shown.
  drawKeys(step) {
    const several = this.panel.metrics.length > 1;
    const many = data.groups.length > 1;
    const keys = [];
    const steps = this.series.flatMap((s) => s.points.map((p) => p.x));
    const at = step === null ? null : nearest(steps, step);
    this.panel.metrics.forEach((metric, m) => {
      const on = this.shown.has(metric);
      if (several) {
        keys.push(make('button', {class: 'key' + (on ? '' : ' off'), title:
          metric, 'aria-pressed': String(on), onclick: () => {
          if (on) this.shown.delete(metric);
          else this.shown.add(metric);
          this.draw();
        }}, sample(many ? 'currentColor' : colourOf(m),
          many ? DASHES[m % DASHES.length] : ''), this.names[m]));
      }
      if (!on) return;
      for (const s of this.series.filter((s) => s.metric === metric)) {
        const point = pointAt(s.points, at);
        if (!point || (step === null && several)) continue;
        const text = number(point.mean) + (point.count > 1
          ? ` [${number(point.low)}, ${number(point.high)}]` : '');
        keys.push(make('span', {class: 'value', 'data-metric': metric,
          'data-group': s.group, 'data-step': point.x,
          style: {color: s.colour}}, text));
      }
    });
    if (at !== null) {
      keys.unshift(make('span', {class: 'at'}, `step ${at}`));
    }
    this.keys.replaceChildren(...keys);
  }
}

function sample(colour, dash) {
  const svg = make('svg', {width: 18, height: 8, 'aria-hidden': 'true'});
  svg.append(make('line', {x1: 0, x2: 18, y1: 4, y2: 4, stroke: colour,
    'stroke-width': 2, 'stroke-dasharray': dash || null}));
  return svg;
}

// Returns the step that is nearest to the pointer; null if there are no steps.
function nearest(steps, step) {
  return steps.reduce((a, b) => (
    a === null || Math.abs(b - step) < Math.abs(a - step) ? b : a), null);
}

// Returns the point of a line at a step, or undefined if the line has no point
// there. If the step is null, the last point is returned.
function pointAt(points, step) {
  if (step === null) return points[points.length - 1];
  return points.find((point) => point.x === step);
}

function hover(step) {
  for (const figure of figures) figure.hover(step);
}

function setRange(text) {
  address.set({x: text});
  drawFigures();
}

function drawFigures() {
  for (const figure of figures) figure.draw();
}

// Figures are drawn when they come into view.
const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = entry.target.figure;
    if (entry.isIntersecting && !figures.has(figure)) {
      figures.add(figure);
      figure.draw();
    }
  }
}, {rootMargin: '300px'});

function figureOf(panel) {
  const figure = new Figure(panel, data.groups.length > 1);
  figure.element.figure = figure;
  inView.observe(figure.element);
  return figure.element;
}

function forgetFigures() {
  inView.disconnect();
  figures.clear();
}

let resizing = 0;
window.addEventListener('resize', () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(drawFigures);
});
