// @ts-check
/** The load of experts: a map of blocks by experts, the busiest device of each block, and who has the experts of
 * a chosen one. The map is a picture; the tables say the same. */

import { guard, html, nothing, svg } from "./vendor/lit.js";
import { Part } from "./element.js";
import { counted, number, percent, slowdown } from "./format.js";
import { shade } from "./heat.js";
import { deviceHref } from "./source.js";
/** @import { ExpertBlock, ExpertGroup, ExpertsView } from "../tools/api.d.ts" */

/** Blocks that are listed, the most uneven first. */
const MOST = 200;

/** Pixels of a cell. @param {number} experts */
const sized = (experts) => (experts <= 16 ? 34 : experts <= 64 ? 16 : 9);

/** @param {ExpertGroup} group */
const groupName = (group) =>
  `p${group.pipeline}${group.lane === null ? " all lanes" : group.lane ? `.${group.lane}` : ""} stage ${group.stage}`;

/** @param {ExpertGroup} group  @param {ExpertBlock} block */
const keyOf = (group, block) => `${group.pipeline}/${group.lane}/${group.stage}/${block.block}`;

/** @param {number[]} parts */
const heaviest = (parts) => parts.indexOf(Math.max(...parts));

export class Experts extends Part {
  static properties = { view: { attribute: false }, chosen: { state: true } };

  constructor() {
    super();
    /** @type {ExpertsView | null} */ this.view = null;
    /** The group and block whose experts are listed; empty: the most uneven one's. */
    this.chosen = "";
  }

  render() {
    const view = this.view;
    if (!view) return nothing;
    const rows = view.groups
      .flatMap((group) => group.blocks.map((block) => ({ key: keyOf(group, block), group, block })))
      .sort((one, other) => other.block.over - one.block.over);
    const chosen = rows.find((row) => row.key === this.chosen) ?? rows[0];
    return html`${guard([view], () => map(view))}
      <div class="panels">
        <div class="scroll tall half" tabindex="0" role="group" aria-label="Blocks by their busiest device">
          <table class="data">
            <caption>
              The busiest device of each block: its time for experts over the least possible
            </caption>
            <thead>
              <tr>
                <th scope="col">block</th>
                ${view.groups.length > 1 ? html`<th scope="col">group</th>` : nothing}
                <th scope="col">busiest device</th>
                <th scope="col" class="num">over the least</th>
                <th scope="col">heaviest expert</th>
                <th scope="col" class="num">of its rows</th>
                <th scope="col" class="num">copies</th>
              </tr>
            </thead>
            <tbody>
              ${rows.slice(0, MOST).map((row) => this.block(view, row, row === chosen))}
            </tbody>
          </table>
          ${rows.length > MOST ? html`<p class="small muted">and ${counted(rows.length - MOST, "block")} more even</p>` : nothing}
        </div>
        ${chosen ? holders(view, chosen.group, chosen.block) : nothing}
      </div>`;
  }

  /** @param {ExpertsView} view  @param {{key: string, group: ExpertGroup, block: ExpertBlock}} row  @param {boolean} chosen */
  block(view, { key, group, block }, chosen) {
    const parts = view.parts[block.block];
    const most = heaviest(parts);
    const copies = block.holders.reduce((sum, own) => sum + own.length - 1, 0);
    const device = group.devices[block.busiest];
    return html`<tr>
      <th scope="row">
        <button
          class="quiet"
          aria-pressed=${chosen ? "true" : "false"}
          @click=${() => {
            this.chosen = key;
          }}
        >
          ${block.block}
        </button>
      </th>
      ${view.groups.length > 1 ? html`<td>${groupName(group)}</td>` : nothing}
      <td><a class="mono" href=${deviceHref(device)}>${device}</a></td>
      <td class="num">${slowdown(block.over)}</td>
      <td>${most}</td>
      <td class="num">${percent(parts[most])}</td>
      <td class="num">${number(copies)}</td>
    </tr>`;
  }
}

/** Rows of each expert over the mean of its block. @param {ExpertsView} view */
function map(view) {
  const blocks = Object.keys(view.parts).map(Number);
  const experts = Math.max(...blocks.map((block) => view.parts[block].length));
  const size = sized(experts);
  const room = 74;
  const words = ["as the mean, or fewer", "1.05x", "1.25x", "1.75x", "2.5x", "4x or more"];
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Load of experts">
      <svg
        width=${room + experts * size}
        height=${blocks.length * size}
        role="img"
        aria-label="Rows of experts over the mean of their block: ${counted(blocks.length, "block")} of ${experts} experts. The tables have the same as text."
      >
        ${blocks.map((block, line) => {
          const parts = view.parts[block];
          return svg`<g transform="translate(0 ${line * size})">
            <text class="label ${size < 16 ? "tiny" : ""}" x="0" y=${size / 2 + 4}>block ${block}</text>
            ${parts.map((part, expert) => cell(part * parts.length, block, expert, room + expert * size, size))}
          </g>`;
        })}
      </svg>
    </div>
    <ul class="legend" aria-label="Legend">
      ${words.map(
        (word, level) =>
          html`<li>
            <svg class="swatch" width="18" height="13" aria-hidden="true">
              <rect class="s${level}" width="18" height="13" rx="2" /></svg
            >${word}
          </li>`,
      )}
    </ul>`;
}

/** @param {number} times  the rows of the expert over the mean  @param {number} block  @param {number} expert
 * @param {number} x  @param {number} size */
function cell(times, block, expert, x, size) {
  const gap = size > 20 ? 3 : 1.5;
  const level = shade(times);
  return svg`<rect class="s${level}" x=${x + gap / 2} y=${gap / 2} width=${size - gap} height=${size - gap} rx="2">
      <title>block ${block}, expert ${expert}: ${slowdown(times)} of the mean</title>
    </rect>
    ${
      size > 20
        ? svg`<text class="on ${level > 3 ? "deep" : ""}" x=${x + size / 2} y=${size / 2 + 4}>${times.toFixed(1)}</text>`
        : nothing
    }`;
}

/** The experts of one block, the heaviest first. @param {ExpertsView} view  @param {ExpertGroup} group  @param {ExpertBlock} block */
function holders(view, group, block) {
  const parts = view.parts[block.block];
  const order = parts.map((_, expert) => expert).sort((one, other) => parts[other] - parts[one]);
  return html`<div
    class="scroll tall half"
    tabindex="0"
    role="group"
    aria-label="Experts of block ${block.block}"
  >
    <table class="data">
      <caption>
        Experts of block ${block.block}${view.groups.length > 1 ? html`, ${groupName(group)}` : nothing}
      </caption>
      <thead>
        <tr>
          <th scope="col" class="num">expert</th>
          <th scope="col" class="num">of the rows</th>
          <th scope="col" class="num">to the mean</th>
          <th scope="col">on</th>
        </tr>
      </thead>
      <tbody>
        ${order.map(
          (expert) =>
            html`<tr>
              <th scope="row" class="num">${expert}</th>
              <td class="num">${percent(parts[expert])}</td>
              <td class="num">${slowdown(parts[expert] * parts.length)}</td>
              <td class="mono">${block.holders[expert].map((place) => group.devices[place]).join(" ")}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

customElements.define("ed-experts", Experts);
