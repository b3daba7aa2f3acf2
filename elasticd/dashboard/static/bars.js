// @ts-check
/** Stacked bars: what the seconds of a step or of a run went to, with the numbers in a table. */

import { html, nothing, svg } from "./vendor/lit.js";
import { Measured } from "./element.js";
import { percent, seconds } from "./format.js";

/**
 * @typedef {object} Kind
 * @property {string} key
 * @property {string} label
 * @property {number} hue  1 to 8
 *
 * @typedef {object} Row
 * @property {string} label
 * @property {string} [note]  behind the bar
 * @property {Record<string, number>} parts  seconds by key
 */

const NAME = 130;
const TALL = 22;
const STEP = 30;

/** A square of a kind's colour. @param {number} hue */
export const swatch = (hue) =>
  html`<svg class="swatch" width="11" height="11" aria-hidden="true">
    <rect class="k${hue}" width="11" height="11" rx="2" />
  </svg>`;

/** @param {Row} row */
const total = (row) => Object.values(row.parts).reduce((sum, value) => sum + value, 0);

export class Bars extends Measured {
  static properties = {
    label: { type: String },
    kinds: { attribute: false },
    rows: { attribute: false },
    share: { type: Boolean },
  };

  constructor() {
    super();
    this.label = "";
    /** @type {Kind[]} */ this.kinds = [];
    /** @type {Row[]} */ this.rows = [];
    this.share = false;
  }

  render() {
    const kinds = this.kinds.filter((kind) => this.rows.some((row) => (row.parts[kind.key] ?? 0) > 0));
    const most = Math.max(...this.rows.map(total), 1e-12);
    return html`<figure class="chart">
      <ul class="key">
        ${kinds.map((kind) => html`<li>${swatch(kind.hue)} ${kind.label}</li>`)}
      </ul>
      ${this.width ? this.drawn(kinds, most) : nothing}
      <details>
        <summary>Numbers</summary>
        <div class="scroll" tabindex="0" role="group" aria-label="${this.label}: numbers">
          <table class="data">
            <thead>
              <tr>
                <th scope="col">of</th>
                ${kinds.map((kind) => html`<th class="num">${kind.label}</th>`)}
                <th class="num">in all</th>
              </tr>
            </thead>
            <tbody>
              ${this.rows.map(
                (row) =>
                  html`<tr>
                    <th scope="row">${row.label}</th>
                    ${kinds.map((kind) => html`<td class="num">${seconds(row.parts[kind.key] ?? 0)}</td>`)}
                    <td class="num">${seconds(total(row))}</td>
                  </tr>`,
              )}
            </tbody>
          </table>
        </div>
      </details>
    </figure>`;
  }

  /** @param {Kind[]} kinds  @param {number} most */
  drawn(kinds, most) {
    const notes = this.rows.map((row) => row.note ?? seconds(total(row)));
    const room = Math.max(60, this.width - NAME - 16 - 6.4 * Math.max(...notes.map((note) => note.length)));
    const summary = this.rows.map((row) => `${row.label} ${seconds(total(row))}`).join(", ");
    return html`<svg
      width=${this.width}
      height=${this.rows.length * STEP}
      role="img"
      aria-label="${this.label}: ${summary}"
    >
      ${this.rows.map((row, index) => {
        let at = NAME;
        const all = total(row);
        return svg`<g transform="translate(0 ${index * STEP})">
          <text class="label" x="0" y="15">${short(row.label, 18)}<title>${row.label}</title></text>
          <rect class="bar-ground" x=${NAME} width=${room} height=${TALL} rx="3" />
          ${kinds.map((kind) => {
            const value = row.parts[kind.key] ?? 0;
            const wide = (room * value) / most;
            const x = at;
            const said = this.share ? percent(value / (all || 1)) : seconds(value);
            at += wide;
            return value <= 0
              ? nothing
              : svg`<g>
              <rect class="k${kind.hue}" x=${x} width=${Math.max(0.5, wide - 0.75)} height=${TALL} />
              <title>${kind.label}: ${seconds(value)} (${percent(value / (all || 1))})</title>
              ${wide > 62 ? svg`<text class="pass-text" x=${x + wide / 2} y="15">${said}</text>` : nothing}
            </g>`;
          })}
          <text x=${NAME + (room * all) / most + 8} y="15">${notes[index]}</text>
        </g>`;
      })}
    </svg>`;
  }
}

/** @param {string} text  @param {number} most */
export const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

customElements.define("ed-bars", Bars);

/** Sequence lengths of a step as a histogram, with their mean. */
export class Lengths extends Measured {
  static properties = { lengths: { attribute: false } };

  constructor() {
    super();
    /** @type {import("../tools/api.d.ts").LengthsView | null} */ this.lengths = null;
  }

  render() {
    const known = this.lengths;
    if (!known || !this.width || !known.now.length) return nothing;
    const most = Math.max(...known.now.map(([, , count]) => count));
    const wide = Math.min(48, Math.max(4, Math.floor(this.width / known.now.length) - 2));
    const tall = 90;
    const all = known.now.reduce((sum, [, , count]) => sum + count, 0);
    const from = known.now[0][0];
    const to = known.now[known.now.length - 1][1];
    const mean = known.mean;
    const at = mean === null ? -1 : known.now.findIndex(([low, high]) => mean >= low && mean < high + 1);
    const label =
      `Sequence lengths of the last step: ${all} sequences of ${from === to ? from : `${from} to ${to}`} tokens` +
      (mean === null ? "" : `; ${Math.round(mean)} in the mean`);
    const middle = at * (wide + 2) + wide / 2;
    const line =
      at < 0
        ? nothing
        : svg`<line class="threshold" x1=${middle} x2=${middle} y1="14" y2=${16 + tall} />
            <text x=${Math.min(middle + 4, this.width - 90)} y="11">mean ${Math.round(mean ?? 0)}</text>`;
    // Two labels where there is room for both; else one at the left, which is never in the way of another.
    const drawn = known.now.length * (wide + 2);
    const range = from === to ? `${from} tokens` : `${from} to ${to} tokens`;
    const axis =
      drawn < 160
        ? svg`<text class="label" x="0" y=${tall + 30}>${range}</text>`
        : svg`<text class="label" x="0" y=${tall + 30}>${from}</text>
            <text class="label end" x=${Math.min(this.width, drawn)} y=${tall + 30}>${to} tokens</text>`;
    return html`<svg width=${this.width} height=${tall + 34} role="img" aria-label=${label}>
      ${known.now.map(([low, high, count], index) => {
        const bar = (tall * count) / most;
        return svg`<rect class="k1" x=${index * (wide + 2)} y=${16 + tall - bar} width=${wide} height=${bar}>
          <title>${low} to ${high} tokens: ${count}</title></rect>`;
      })}
      ${line} ${axis}
    </svg>`;
  }
}

customElements.define("ed-lengths", Lengths);
