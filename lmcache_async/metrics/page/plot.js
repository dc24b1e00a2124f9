// Charts as SVG.

import { at, colour, node, shape } from "./dom.js";
import { WRITTEN, seconds } from "./words.js";

function ceiling(value, unit) {
  if (unit === "share") return 1;
  if (value <= 0) return unit === "count" ? 4 : 1;
  const base = unit === "bytes" ? 1024 : 1000;
  let whole = 1;
  while (value / whole >= base) whole *= base;
  let decade = 1;
  while (value / whole / decade > 10) decade *= 10;
  for (const step of [1, 2, 4, 6, 8, 10]) {
    if (step * decade * whole >= value) return step * decade * whole;
  }
  return 10 * decade * whole;
}

class Plot {
  constructor() {
    this.title = node("h2");
    this.note = node("p");
    this.legend = node("ul", { cls: "legend" });
    this.svg = shape("svg", { class: "plot", role: "img" });
    this.element = node("div", { cls: "card chart" }, node("div", { cls: "head" }, this.title, this.note), this.legend, this.svg);
    this.hovered = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(chart, interval) {
    this.chart = chart;
    this.interval = interval;
    this.title.textContent = chart.title;
    this.draw();
  }

  point(event) {
    if (!this.chart) return;
    const steps = this.steps();
    this.hovered = null;
    if (event) {
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      const ago = Math.round(((this.right - x) / (this.right - this.left)) * steps);
      if (ago >= 0 && ago < this.length()) this.hovered = ago;
    }
    this.draw();
  }

  // As many whole minutes as there are values of, from one to five.
  minutes() { return Math.min(5, Math.max(1, Math.ceil((this.length() * this.interval) / 60))); }
  steps() { return Math.max(1, Math.round((60 * this.minutes()) / this.interval) - 1); }
  length() { return Math.max(0, ...this.chart.series.map((series) => series.values.length)); }

  draw() {
    if (!this.chart) return;
    const width = this.svg.clientWidth || 480;
    const height = 170;
    Object.assign(this, { left: 58, right: width - 6, top: 8, bottom: height - 20 });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const { chart } = this;
    const series = chart.series.map((one, index) => ({ ...one, fill: colour(one.name, index) }));
    const drawn = chart.stacked ? stacked(series) : series.map((one) => ({ ...one, base: null }));
    const highest = Math.max(0, ...drawn.flatMap((one) => one.values.map((value) => value ?? 0)));
    this.most = ceiling(highest, chart.unit);
    this.axes();
    if (this.length() < 2) {
      this.svg.append(shape("text", { class: "none", x: (this.left + this.right) / 2, y: (this.top + this.bottom) / 2 }, "waiting for the first values"));
    }
    for (const one of [...drawn].reverse()) this.trace(one);
    this.words(series);
  }

  axes() {
    const write = WRITTEN[this.chart.unit];
    for (const part of [0, 0.5, 1]) {
      const y = this.y(part * this.most);
      this.svg.append(
        shape("line", { class: "gridline", x1: this.left, x2: this.right, y1: y, y2: y }),
        shape("text", { x: this.left - 7, y: y + 4, "text-anchor": "end" }, write(part * this.most)),
      );
    }
    const minutes = this.minutes();
    const parts = minutes === 1 ? 4 : minutes;
    for (let part = 0; part <= parts; part += 1) {
      const x = this.right - ((this.right - this.left) * part) / parts;
      const anchor = part === 0 ? "end" : part === parts ? "start" : "middle";
      const ago = minutes === 1 ? `−${15 * part} s` : `−${part} min`;
      this.svg.append(shape("text", { x, y: this.bottom + 16, "text-anchor": anchor }, part ? ago : "now"));
    }
    if (this.hovered !== null) {
      const x = this.x(this.hovered);
      this.svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: this.top, y2: this.bottom }));
    }
  }

  x(ago) { return this.right - ((this.right - this.left) * ago) / this.steps(); }
  y(value) { return this.bottom - (this.bottom - this.top) * Math.min(1, value / this.most); }

  trace(one) {
    const last = one.values.length - 1;
    for (const [start, stop] of runs(one.values)) {
      const points = [];
      for (let index = start; index < stop; index += 1) {
        points.push(`${this.x(last - index).toFixed(1)},${this.y(one.values[index]).toFixed(1)}`);
      }
      const under = [];
      for (let index = stop - 1; index >= start; index -= 1) {
        under.push(`${this.x(last - index).toFixed(1)},${this.y(one.base ? one.base[index] : 0).toFixed(1)}`);
      }
      const area = shape("polygon", { class: one.base ? "stack" : "area", points: [...points, ...under].join(" ") });
      area.style.fill = one.fill;
      this.svg.append(area);
      if (!one.base) {
        const line = shape("polyline", { class: "line", points: points.join(" ") });
        line.style.stroke = one.fill;
        this.svg.append(line);
      }
    }
  }

  words(series) {
    const write = WRITTEN[this.chart.unit];
    const ago = this.hovered === null ? 0 : this.hovered;
    this.note.textContent = this.hovered === null ? this.chart.note : `${seconds(ago * this.interval)} ago`;
    const items = series.map((one) => {
      const value = one.values[one.values.length - 1 - ago];
      return [one.name, value === null || value === undefined ? "–" : write(value), one.fill];
    });
    this.legend.replaceChildren(
      ...items.map(([name, value, fill]) =>
        node("li", {}, node("span", { cls: "swatch", style: { background: fill } }), name, node("b", {}, value)),
      ),
    );
    this.svg.setAttribute("aria-label", `${this.chart.title}: ${items.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  }
}

function stacked(series) {
  let below = null;
  return series.map((one) => {
    const base = one.values.map((value, index) => (below ? below[index] ?? 0 : 0));
    const values = one.values.map((value, index) => (value === null ? null : value + base[index]));
    below = values.map((value, index) => value ?? base[index]);
    return { ...one, values, base };
  });
}

function runs(values) {
  const found = [];
  let start = null;
  values.forEach((value, index) => {
    if (value !== null && start === null) start = index;
    if (value === null && start !== null) {
      found.push([start, index]);
      start = null;
    }
  });
  if (start !== null) found.push([start, values.length]);
  return found;
}

const plots = new Map();

export function showCharts(charts) {
  for (const chart of charts.list) {
    let plot = plots.get(chart.title);
    if (!plot) {
      plot = new Plot();
      plots.set(chart.title, plot);
      at("charts").append(plot.element);
    }
    plot.show(chart, charts.interval_s);
  }
  for (const [title, plot] of plots) {
    if (charts.list.some((chart) => chart.title === title)) continue;
    plot.element.remove();
    plots.delete(title);
  }
}
