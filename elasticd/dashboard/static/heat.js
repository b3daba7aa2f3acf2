// @ts-check
/** The heat map of devices, by host or by place in the plan. It is a picture; a table says the same. */

import { guard, html, nothing, repeat, svg } from "./vendor/lit.js";
import { Part } from "./element.js";
import { counted, slowdown } from "./format.js";
import { deviceHref } from "./source.js";

/**
 * @typedef {object} Cell
 * @property {string} name  "node/local rank"
 * @property {number} slowdown  1 normal
 * @property {string} state  a key of STATES
 *
 * @typedef {object} Band  a node, or a stage of a pipeline
 * @property {string} key
 * @property {string} label
 * @property {Cell[]} cells
 * @property {number[]} [columns]  the column of each cell, where there are gaps between them
 */

/** The states of a device, the worst first: the sign in its cell, the tone of its chip, the look of its cell.
 * @type {Record<string, {glyph: string, tone: string, look: string}>} */
export const STATES = {
  unreachable: { glyph: "?", tone: "bad", look: "unreachable" },
  hung: { glyph: "‖", tone: "bad", look: "unreachable" },
  slow: { glyph: "▲", tone: "warn", look: "" },
  drained: { glyph: "▨", tone: "info", look: "drained" },
  draining: { glyph: "▨", tone: "info", look: "drained" },
  standby: { glyph: "○", tone: "hollow", look: "standby" },
  state: { glyph: "◇", tone: "hollow", look: "standby" },
  unused: { glyph: "·", tone: "hollow", look: "standby" },
  healthy: { glyph: "✓", tone: "ok", look: "" },
};

/** Bounds of the shades: below each one the shade of its place. */
export const BOUNDS = [1.05, 1.25, 1.75, 2.5, 4];

/** @param {number} value */
export function shade(value) {
  const at = BOUNDS.findIndex((bound) => value < bound);
  return at < 0 ? BOUNDS.length : at;
}

/** How many pixels a cell has. @param {number} devices */
const sized = (devices) => (devices <= 128 ? 34 : devices <= 512 ? 24 : devices <= 2048 ? 16 : 11);

/** Of the cells of which a large map has most, the look that all of them share; empty: it is another one.
 * @param {Cell} cell */
function common(cell) {
  if (cell.state === "unused" && shade(cell.slowdown) === 0) return "standby";
  return !STATES[cell.state]?.look && shade(cell.slowdown) === 0 ? "s0" : "";
}

/** @param {Cell} cell  @param {number} x  @param {number} size */
function drawn(cell, x, size) {
  const gap = size > 20 ? 3 : 1.5;
  const look = STATES[cell.state]?.look || `s${shade(cell.slowdown)}`;
  const wide = size - gap;
  return svg`<rect class="device ${look}" data-device=${cell.name} x=${x + gap / 2} y=${gap / 2}
    width=${wide} height=${wide} rx=${size > 20 ? 3 : 1.5} />`;
}

/** One shape for all common cells of a row, so that thousands are drawn soon.
 * @param {string} look  @param {number[]} places  @param {number} size */
const together = (look, places, size) =>
  svg`<path class=${look} d=${places.map((x) => `M${x + 0.75} .75h${size - 1.5}v${size - 1.5}h${1.5 - size}z`).join("")} />`;

/** @param {Cell} cell  @param {number} x  @param {number} size */
function marked(cell, x, size) {
  const text = mark(cell, size);
  if (!text) return nothing;
  const look = STATES[cell.state]?.look ? "mark" : shade(cell.slowdown) > 3 ? "deep" : "";
  const y = size / 2 + (size < 24 ? 3.2 : 4);
  return svg`<text class="on ${look} ${size < 24 ? "tiny" : ""}" x=${x + size / 2} y=${y}>${text}</text>`;
}

/** What stands in a cell beside its colour: the slowdown, or the sign of the state.
 * @param {Cell} cell  @param {number} size */
function mark(cell, size) {
  if (STATES[cell.state]?.look) return STATES[cell.state].glyph;
  if (shade(cell.slowdown) === 0) return "";
  if (size >= 24) return cell.slowdown >= 9.95 ? cell.slowdown.toFixed(0) : cell.slowdown.toFixed(1);
  return cell.slowdown < 1.75 ? "+" : Math.min(9, Math.round(cell.slowdown)).toFixed(0);
}

/** Bands that are looked at together. */
const CHUNK = 120;
/** Chunks that are drawn at once. */
const FIRST = 2;

export class Heat extends Part {
  static properties = {
    bands: { attribute: false },
    rows: { type: Boolean },
    heads: { attribute: false },
    label: { type: String },
    over: { state: true },
    drawn: { state: true },
  };

  constructor() {
    super();
    /** @type {Band[]} */ this.bands = [];
    this.label = "Devices";
    /** Whether each band has a row of its own. */ this.rows = false;
    /** @type {{column: number, label: string}[]} Above the columns. */ this.heads = [];
    /** @type {string} */ this.over = "";
    /** @type {Band[][]} */ this.chunks = [];
    /** How many chunks are drawn: a screen of them first, the others one by one, so that nothing waits long. */
    this.drawn = FIRST;
    this.next = 0;
    this.size = 0;
    this.room = 0;
    this.summary = "";
    /** @param {PointerEvent} event */
    this.pointed = (event) => {
      const name = this.named(event);
      if (name !== this.over) this.over = name;
    };
    /** @param {MouseEvent} event */
    this.opened = (event) => {
      const name = this.named(event);
      if (name)
        this.dispatchEvent(
          new CustomEvent("go", {
            detail: deviceHref(name),
            bubbles: true,
            composed: true,
          }),
        );
    };
  }

  /** What follows from the bands. @param {Map<PropertyKey, unknown>} changed */
  willUpdate(changed) {
    if (!changed.has("bands") && !changed.has("label")) return;
    let devices = 0;
    let longest = 0;
    /** @type {Record<string, number>} */
    const counts = {};
    for (const band of this.bands) {
      devices += band.cells.length;
      longest = Math.max(longest, band.label.length);
      for (const cell of band.cells) counts[cell.state] = (counts[cell.state] ?? 0) + 1;
    }
    this.size = sized(devices);
    this.room = Math.min(180, Math.ceil(longest * (this.size < 16 ? 5.5 : 6.8)) + 10);
    const said = Object.entries(counts).map(([state, count]) => `${count} ${state}`);
    const all = counted(devices, "device");
    this.summary = `${this.label}: ${all}; ${said.join(", ")}. The table has the same as text.`;
    // Bands in which nothing changed are the same objects as before: a chunk of them is passed over at once.
    const before = this.chunks;
    this.chunks = [];
    for (let first = 0; first < this.bands.length; first += CHUNK) {
      const old = before[this.chunks.length];
      const next = this.bands.slice(first, first + CHUNK);
      const same = old?.length === next.length && next.every((band, index) => band === old[index]);
      this.chunks.push(same ? old : next);
    }
  }

  render() {
    const { size, room } = this;
    return html`<div
        class="heat ${this.rows ? "rows" : ""}"
        role="img"
        aria-label=${this.summary}
        @pointermove=${this.pointed}
        @click=${this.opened}
      >
        ${this.heads.length ? this.headed(size, room) : nothing}
        ${this.chunks.slice(0, this.drawn).map(
          (chunk) =>
            html`<div class="chunk ${this.chunks.length > 1 ? "contained" : ""}">
              ${guard([chunk, size, room], () =>
                repeat(
                  chunk,
                  (band) => band.key,
                  (band) => guard([band, size, room], () => row(band, size, room)),
                ),
              )}
            </div>`,
        )}
      </div>
      <p class="small muted" aria-hidden="true">${this.said()}</p>`;
  }

  updated() {
    if (this.drawn < this.chunks.length && !this.next) {
      this.next = setTimeout(() => {
        this.next = 0;
        this.drawn += 1;
      }, 0);
    }
  }

  /** @param {number} size  @param {number} room */
  headed(size, room) {
    const width = room + (Math.max(...this.bands.map(extent), 1) + 1) * size;
    return html`<svg width=${width} height="16">
      ${this.heads.map(
        (head) => svg`<text class="label" x=${room + head.column * size} y="12">${head.label}</text>`,
      )}
    </svg>`;
  }

  /** The device below the pointer; empty where there is none. @param {MouseEvent} event */
  named(event) {
    const drawing = event.target instanceof Element ? event.target.closest("svg[data-band]") : null;
    const key = drawing?.getAttribute("data-band");
    const band = key ? this.bands.find((each) => each.key === key) : undefined;
    if (!drawing || !band) return "";
    const column = (event.clientX - drawing.getBoundingClientRect().left - this.room) / this.size;
    const index = band.cells.findIndex((_, place) => {
      const start = band.columns?.[place] ?? place;
      return column >= start && column < start + 1;
    });
    return band.cells[index]?.name ?? "";
  }

  said() {
    const cell = this.over && this.found(this.over);
    if (!cell) return "Point at a device to read it, click to open it.";
    return `${cell.name}: ${slowdown(cell.slowdown)}, ${cell.state}`;
  }

  /** @param {string} name */
  found(name) {
    for (const band of this.bands) for (const cell of band.cells) if (cell.name === name) return cell;
    return null;
  }
}

/** How many columns a band has. @param {Band} band */
const extent = (band) => (band.columns ? Math.max(0, ...band.columns) + 1 : band.cells.length);

/** @param {Band} band  @param {number} size  @param {number} room */
const row = (band, size, room) => {
  const at = (/** @type {number} */ index) => room + (band.columns?.[index] ?? index) * size;
  /** @type {Record<string, number[]>} */
  const places = {};
  const cells = [];
  const marks = [];
  for (let index = 0; index < band.cells.length; index += 1) {
    const cell = band.cells[index];
    const x = at(index);
    const look = size < 20 ? common(cell) : "";
    if (look) {
      (places[look] ??= []).push(x);
      continue;
    }
    cells.push(drawn(cell, x, size));
    const text = marked(cell, x, size);
    if (text !== nothing) marks.push(text);
  }
  return html`<svg data-band=${band.key} width=${room + extent(band) * size} height=${size}>
    <text class="label ${size < 16 ? "tiny" : ""}" x="0" y=${size / 2 + 4}>${cut(band.label)}</text>
    ${Object.entries(places).map(([look, all]) => together(look, all, size))}${cells}${marks}
  </svg>`;
};

/** @param {string} label */
const cut = (label) => (label.length > 25 ? `…${label.slice(-24)}` : label);

/** What the colours and signs mean, of the states that there are. @param {Record<string, number>} counts */
export const legend = (counts) => {
  const words = ["normal", "1.05x", "1.25x", "1.75x", "2.5x", "4x or more"];
  const others = Object.entries(STATES).filter(([state, { look }]) => look && counts[state]);
  return html`<ul class="legend" aria-label="Legend">
    ${words.map(
      (word, level) =>
        html`<li>
          <svg class="swatch" width="18" height="13" aria-hidden="true">
            <rect class="s${level}" width="18" height="13" rx="2" /></svg
          >${word}
        </li>`,
    )}
    ${others.map(
      ([state, { glyph, look }]) =>
        html`<li>
          <svg class="swatch" width="18" height="13" aria-hidden="true">
            <rect class=${look} x="1" y="1" width="16" height="11" rx="2" /></svg
          >${glyph} ${state}
        </li>`,
    )}
  </ul>`;
};

/** The pattern of drained devices, once in a document. */
export const patterns = html`<svg width="0" height="0" aria-hidden="true" class="defs">
  <defs>
    <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <rect class="hatch-ground" width="5" height="5" />
      <line class="hatch-line" x1="0" y1="0" x2="0" y2="5" />
    </pattern>
  </defs>
</svg>`;

customElements.define("ed-heat", Heat);
