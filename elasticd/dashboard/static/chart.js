// @ts-check
/** Curves over steps or over time, with marks: uPlot in a figure whose numbers can be read as a table too. */

import { LitElement, html, nothing } from "./vendor/lit.js";
import uPlot from "./vendor/uplot.js";
import { clock, figure, number } from "./format.js";

/**
 * @typedef {object} Curve
 * @property {string} label  what it is, in words
 * @property {number} hue  1 to 8: the colour of the line
 * @property {number[]} [dash]  its pattern, so that colour is not needed to tell lines apart
 * @property {(number | null)[]} values  one for each x
 * @property {boolean} [guess]  the axis is not drawn for it: it may be far from what is measured
 * @property {boolean} [steps]  each value holds until the next: nothing lies between the two
 *
 * @typedef {object} Mark
 * @property {number} x  where it stands
 * @property {string} glyph  a letter or sign above the line
 * @property {string} text  what happened
 * @property {string} [href]  where more is said of it
 */

/** A colour of the style sheet, as the theme has it now. @param {string} name */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A curve's pattern and colour. @param {Curve} curve */
export const line = (curve) => {
  const dash = (curve.dash ?? []).join(" ");
  return html`<svg width="26" height="10" aria-hidden="true">
    <line class="line k${curve.hue}" x1="0" x2="26" y1="5" y2="5" stroke-dasharray=${dash} />
  </svg>`;
};

/** Digits behind the point of numbers that are so far apart. @param {number} apart */
const digits = (apart) => Math.max(0, Math.min(6, -Math.floor(Math.log10(apart || 1) + 1e-9)));

export class Chart extends LitElement {
  static properties = {
    label: { type: String },
    x: { attribute: false },
    curves: { attribute: false },
    marks: { attribute: false },
    levels: { attribute: false },
    time: { type: Boolean },
    height: { type: Number },
    unit: { type: String },
    at: { state: true },
  };

  constructor() {
    super();
    this.label = "";
    /** @type {number[]} */ this.x = [];
    /** @type {Curve[]} */ this.curves = [];
    /** @type {Mark[]} */ this.marks = [];
    /** @type {{value: number, label: string}[]} */ this.levels = [];
    this.time = false;
    this.height = 220;
    this.unit = "";
    /** @type {number | null} */ this.at = null;
    /** @type {uPlot | null} */ this.plot = null;
    /** @type {ResizeObserver | null} */ this.sizes = null;
    this.shape = "";
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.themed = () => this.plot?.redraw(false);
  }

  createRenderRoot() {
    return this;
  }

  connectedCallback() {
    super.connectedCallback();
    this.theme.addEventListener("change", this.themed);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.theme.removeEventListener("change", this.themed);
    this.sizes?.disconnect();
    this.plot?.destroy();
    this.plot = null;
    this.shape = "";
  }

  /** @param {number} x */
  named(x) {
    return this.time ? clock(x) : `step ${x}`;
  }

  /** A tick of the x axis. @param {number} value  @param {number} apart */
  tick(value, apart) {
    if (!this.time) return Number.isInteger(value) ? number(value) : "";
    return apart < 60 ? clock(value) : clock(value).slice(0, 5);
  }

  summary() {
    const last = this.x.length - 1;
    if (last < 0) return `${this.label}: nothing yet`;
    const said = this.curves.map((curve) => `${curve.label} ${figure(curve.values[last])} ${this.unit}`);
    return `${this.label}, ${this.named(this.x[0])} to ${this.named(this.x[last])}. Last: ${said.join(", ")}.`;
  }

  render() {
    const at = this.at ?? this.x.length - 1;
    return html`<figure class="chart">
      <ul class="key">
        ${this.curves.map((curve) => this.keyed(curve, at))}
        <li class="muted">${this.unit}${this.x.length ? html` at ${this.named(this.x[at])}` : nothing}</li>
      </ul>
      <div class="plot" role="img" aria-label=${this.summary()}></div>
      ${
        this.marks.length
          ? html`<ul class="marks" aria-label="Marks">
              ${this.marks
                .slice(-8)
                .map(
                  (mark) =>
                    html`<li>
                      <b>${mark.glyph}</b> ${this.named(mark.x)}:
                      ${mark.href ? html`<a href=${mark.href}>${mark.text}</a>` : mark.text}
                    </li>`,
                )}
            </ul>`
          : nothing
      }
      <details>
        <summary>Numbers</summary>
        <div class="scroll tall" tabindex="0" role="group" aria-label="${this.label}: numbers">
          <table class="data">
            <thead>
              <tr>
                <th>${this.time ? "time" : "step"}</th>
                ${this.curves.map((curve) => html`<th class="num">${curve.label}</th>`)}
              </tr>
            </thead>
            <tbody>
              ${this.rows()}
            </tbody>
          </table>
        </div>
      </details>
    </figure>`;
  }

  /** @param {Curve} curve  @param {number} at */
  keyed(curve, at) {
    return html`<li>${line(curve)} ${curve.label} <b>${figure(curve.values[at])}</b></li>`;
  }

  rows() {
    const first = Math.max(0, this.x.length - 60);
    return this.x
      .slice(first)
      .map(
        (x, index) =>
          html`<tr>
            <td>${this.time ? clock(x) : x}</td>
            ${this.curves.map((curve) => html`<td class="num">${figure(curve.values[first + index])}</td>`)}
          </tr>`,
      )
      .reverse();
  }

  /** @param {Map<PropertyKey, unknown>} changed */
  updated(changed) {
    const place = /** @type {HTMLElement} */ (this.querySelector(".plot"));
    const shape = this.curves.map((curve) => curve.label).join("|") + this.time;
    if (this.plot && shape !== this.shape) {
      this.plot.destroy();
      this.plot = null;
    }
    const data = /** @type {uPlot.AlignedData} */ ([this.x, ...this.curves.map((curve) => curve.values)]);
    if (this.plot) {
      if (data[0] !== this.plot.data[0] || this.curves.some((c, i) => c.values !== this.plot?.data[i + 1])) {
        this.plot.setData(data);
      } else if (changed.has("marks") || changed.has("levels")) {
        this.plot.redraw(false);
      }
      return;
    }
    if (!this.x.length) return;
    this.shape = shape;
    this.plot = new uPlot(this.options(place.clientWidth || 600), data, place);
    this.sizes?.disconnect();
    this.sizes = new ResizeObserver(() => {
      const width = place.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    });
    this.sizes.observe(place);
  }

  /** @param {number} width  @returns {uPlot.Options} */
  options(width) {
    const axis = {
      stroke: () => colour("--muted"),
      font: `11px ${colour("--sans")}`,
      grid: { stroke: () => colour("--grid"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1, size: 4 },
    };
    return {
      width,
      height: this.height,
      padding: [14, 18, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: this.time },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 30,
          space: this.time ? 80 : 60,
          values: (_, splits) => splits.map((value) => this.tick(value, splits[1] - splits[0])),
        },
        {
          ...axis,
          size: 58,
          values: (_, splits, __, ___, apart) => splits.map((value) => number(value, digits(apart))),
        },
      ],
      series: [
        {},
        ...this.curves.map((curve) => ({
          label: curve.label,
          stroke: () => colour(`--c${curve.hue}`),
          width: 2,
          dash: curve.dash,
          points: { show: false },
          spanGaps: false,
          auto: !curve.guess,
          ...(curve.steps ? { paths: uPlot.paths.stepped?.({ align: 1 }) } : {}),
        })),
      ],
      cursor: { y: false, drag: { x: true, y: false } },
      hooks: {
        setCursor: [
          (plot) => {
            this.at = plot.cursor.idx ?? null;
          },
        ],
        draw: [(plot) => this.drawn(plot)],
      },
    };
  }

  /** From zero, unless that would press all lines together. @param {number} low  @param {number} high */
  range(low, high) {
    const levels = this.levels.map((level) => level.value);
    const least = Math.min(low ?? 0, ...levels);
    const most = Math.max(high ?? 1, ...levels);
    if (!Number.isFinite(least) || !Number.isFinite(most)) return /** @type {[number, number]} */ ([0, 1]);
    if (least === most)
      return /** @type {[number, number]} */ (least === 0 ? [0, 1] : [0, 1.2 * most].sort((a, b) => a - b));
    const from = least >= 0 && least < 0.6 * most ? 0 : least - 0.1 * (most - least || Math.abs(most) || 1);
    return /** @type {[number, number]} */ ([from, most + 0.08 * (most - from || 1)]);
  }

  /** Marks and levels. @param {uPlot} plot */
  drawn(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px ${colour("--sans")}`;
    ctx.lineWidth = ratio;
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    let last = -Infinity; // where the last sign stands: signs that would cover each other are left out
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.x, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour("--strong-line");
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillStyle = colour("--ink");
      if (x - last < 9 * ratio) continue;
      ctx.fillText(mark.glyph, x, bbox.top);
      last = x;
    }
    this.levels.forEach((level, index) => {
      const y = Math.round(plot.valToPos(level.value, "y", true));
      ctx.strokeStyle = colour("--c2");
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillStyle = colour("--ink");
      // Two levels are often close: one has its name above its line, the other below.
      ctx.textAlign = "left";
      ctx.textBaseline = index % 2 ? "top" : "bottom";
      ctx.fillText(level.label, bbox.left + 6 * ratio, y + (index % 2 ? 3 : -2) * ratio);
    });
    ctx.restore();
  }
}

customElements.define("ed-chart", Chart);
