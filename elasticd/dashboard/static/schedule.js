// @ts-check
/** A plan drawn: its pipelines and stages as boxes as wide as their layers, and the predicted 1F1B schedule. */

import { html, nothing, svg } from "./vendor/lit.js";
import { short } from "./bars.js";
import { Measured } from "./element.js";
import { counted, percent, seconds, slowdown } from "./format.js";
import { shade } from "./heat.js";
import { deviceHref } from "./source.js";
/** @import { PipelineBox, StageBox, TimelineLane } from "../tools/api.d.ts" */

const NAME = 96;
/** Rows that are drawn; the rest is counted. */
const MOST = 64;
const LINE = 20;

/** Whether a plan's pipelines have lanes, and modules. @param {{module: string, lane: number}[]} rows */
function naming(rows) {
  const modules = new Set(rows.map((row) => row.module)).size > 1;
  const lanes = rows.some((row) => row.lane > 0);
  /** @param {{module: string, pipeline: number, lane: number}} row */
  return (row) => `${modules ? `${row.module} p` : "pipeline "}${row.pipeline}${lanes ? `.${row.lane}` : ""}`;
}

export class PlanPicture extends Measured {
  static properties = { pipelines: { attribute: false } };

  constructor() {
    super();
    /** @type {PipelineBox[]} */ this.pipelines = [];
    /** @param {MouseEvent} event */
    this.opened = (event) => {
      const name = event.target instanceof Element && event.target.getAttribute("data-device");
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

  render() {
    const shown = this.pipelines.slice(0, MOST);
    const named = naming(this.pipelines);
    const room = Math.max(200, this.width - NAME - 4);
    return html`${this.width ? shown.map((row) => this.row(row, named(row), room)) : nothing}
      ${this.pipelines.length > MOST ? html`<p class="muted">and ${this.pipelines.length - MOST} more</p>` : nothing}
      <details>
        <summary class="muted small">Numbers</summary>
        <div class="scroll" tabindex="0" role="group" aria-label="The plan: numbers">
          <table class="data">
            <thead>
              <tr>
                <th scope="col">pipeline</th>
                <th scope="col" class="num">micro-batches</th>
                <th scope="col" class="num">stage</th>
                <th scope="col">layers</th>
                <th scope="col">devices, their shares</th>
                <th scope="col" class="num">load</th>
              </tr>
            </thead>
            <tbody>
              ${shown.flatMap((row) =>
                row.stages.map(
                  (stage) =>
                    html`<tr>
                      <th scope="row">${named(row)}</th>
                      <td class="num">${row.micro_batches}</td>
                      <td class="num">${stage.stage}</td>
                      <td>${stage.named} (${stage.layers})${stage.recompute ? ", recompute" : ""}</td>
                      <td class="mono">
                        ${stage.devices.map(
                          (device, at) =>
                            html`<a href=${deviceHref(device)}>${device}</a>${
                                stage.slowdowns[at] > 1 ? ` ${slowdown(stage.slowdowns[at])}` : ""
                              }${stage.devices.length > 1 ? ` ${percent(stage.shares[at])}` : ""} `,
                        )}
                      </td>
                      <td class="num">${percent(stage.load, 0)}</td>
                    </tr>`,
                ),
              )}
            </tbody>
          </table>
        </div>
      </details>`;
  }

  /** @param {PipelineBox} row  @param {string} name  @param {number} room */
  row(row, name, room) {
    const said = row.stages.map((stage) => `layers ${stage.named} on ${stage.devices.join(" ")}`);
    const layers = row.stages.reduce((sum, stage) => sum + stage.layers, 0);
    const most = Math.max(...row.stages.map((stage) => stage.devices.length));
    const tall = 24 + LINE * Math.min(most, 8) + 12;
    const widths = shares(
      row.stages.map((stage) => stage.layers / layers),
      room,
      Math.min(92, room / row.stages.length),
    );
    let at = NAME;
    return html`<svg
      width=${this.width}
      height=${tall + 8}
      role="img"
      @click=${this.opened}
      aria-label="${name}, ${row.items ? `weight ${row.micro_batches}` : counted(row.micro_batches, "micro-batch", "micro-batches")}: ${said.join("; ")}"
    >
      <text x="0" y="16">${name}</text>
      <text class="label" x="0" y="32">
        ${row.items ? `weight ${row.micro_batches}` : counted(row.micro_batches, "micro-batch", "micro-b.")}
      </text>
      ${row.seconds === null ? nothing : svg`<text class="label" x="0" y="48">${seconds(row.seconds)}</text>`}
      ${row.stages.map((stage, index) => {
        const x = at;
        at += widths[index];
        return box(stage, x, widths[index] - 5, tall);
      })}
    </svg>`;
  }
}

/** Widths by parts of `room`, none below `least`.
 * @param {number[]} parts  @param {number} room  @param {number} least */
function shares(parts, room, least) {
  const spare = Math.max(0, room - least * parts.length);
  return parts.map((part) => least + spare * part);
}

/** @param {StageBox} stage  @param {number} x  @param {number} wide  @param {number} tall */
function box(stage, x, wide, tall) {
  const load = Math.max(0, Math.min(1, stage.load));
  const room = wide - 12;
  const shown = stage.devices.slice(0, 8);
  const most = Math.max(...stage.shares);
  return svg`<g>
    <rect class="box" x=${x} y="0" width=${wide} height=${tall} rx="4" />
    <text x=${x + 6} y="15">${short(`layers ${stage.named}${stage.recompute ? " ↻" : ""}`, Math.floor(room / 5.6) - 5)}</text>
    <text class="label end" x=${x + wide - 6} y="15">${percent(load, 0)}</text>
    ${shown.map((device, index) => {
      const level = shade(stage.slowdowns[index]);
      const y = 22 + index * LINE;
      const slow = stage.slowdowns[index] > 1 ? ` ${slowdown(stage.slowdowns[index])}` : "";
      const part = stage.devices.length > 1 ? ` ${percent(stage.shares[index], 0)}` : "";
      const text = short(`${device}${slow}${part}`, Math.floor(room / 6.4));
      return svg`<g><rect class="device s${level}" data-device=${device} x=${x + 6} y=${y} height=${LINE - 3}
          width=${Math.max(20, (room * stage.shares[index]) / most)} rx="2" />
        <text class="on-device ${level > 3 ? "deep" : ""}" x=${x + 11} y=${y + 12.5}>${text}</text>
        <title>${device}${slow}${part}</title></g>`;
    })}
    ${stage.devices.length > 8 ? svg`<text class="label" x=${x + 6} y=${tall - 12}>+ ${stage.devices.length - 8}</text>` : nothing}
    <rect class="load-rest" x=${x + 6} y=${tall - 7} width=${room} height="3" rx="1.5" />
    <rect class="load" x=${x + 6} y=${tall - 7} width=${room * load} height="3" rx="1.5" /></g>`;
}

export class Timeline extends Measured {
  static properties = {
    lanes: { attribute: false },
    pipelines: { attribute: false },
    seconds: { type: Number },
  };

  constructor() {
    super();
    /** @type {TimelineLane[]} */ this.lanes = [];
    /** Of a plan of several modules: whose devices name the rows. @type {PipelineBox[]} */ this.pipelines = [];
    this.seconds = 0;
  }

  render() {
    if (!this.width) return nothing;
    const named = naming(this.lanes);
    const several = this.pipelines.length > 0;
    const most = Math.max(
      ...this.lanes.map((lane) => Math.max(0, ...lane.stages.flat().map((pass) => pass.stop))),
      1e-12,
    );
    const room = Math.max(200, this.width - NAME - 4);
    const scale = room / most;
    return html`<ul class="key">
        <li>
          <svg class="swatch" width="11" height="11" aria-hidden="true">
            <rect class="forward" width="11" height="11" rx="2" />
          </svg>
          forward (number: micro-batch)
        </li>
        <li>
          <svg class="swatch" width="11" height="11" aria-hidden="true">
            <rect class="backward" width="11" height="11" rx="2" />
          </svg>
          backward (underlined)
        </li>
        <li class="muted">
          ${several ? "gaps: it waits, or passes another module" : "gaps: pipeline bubble"}. ${seconds(most)} in
          all
        </li>
      </ul>
      ${this.lanes.map((lane) => this.lane(lane, named(lane), scale))}`;
  }

  /** The devices of each stage of a lane, as far as they are known. @param {TimelineLane} lane */
  members(lane) {
    const same = (/** @type {PipelineBox} */ row) =>
      row.module === lane.module && row.pipeline === lane.pipeline && row.lane === lane.lane;
    return this.pipelines.find(same)?.stages.map((stage) => stage.devices) ?? [];
  }

  /** @param {TimelineLane} lane  @param {string} name  @param {number} scale */
  lane(lane, name, scale) {
    const tall = 17;
    const members = this.members(lane);
    const what = this.pipelines.length > 0 ? "as predicted" : "1F1B as predicted";
    const height = lane.stages.length * (tall + 2) + 20;
    const busy = lane.stages.map((passes) => passes.reduce((sum, pass) => sum + pass.stop - pass.start, 0));
    const said = busy.map((each, stage) => `stage ${stage} ${percent(each / (lane.seconds || 1), 0)}`);
    const alike = lane.alike > 1 ? ` and ${lane.alike - 1} alike` : "";
    return html`<svg
      width=${this.width}
      height=${height}
      role="img"
      aria-label="${name}${alike}, ${what}: ${seconds(lane.seconds)}; busy: ${said.join(", ")}"
    >
      <text x="0" y="12">${name}</text>
      ${lane.alike > 1 ? svg`<text class="label" x=${NAME} y="12">and ${lane.alike - 1} alike</text>` : nothing}
      ${lane.shortened ? svg`<text class="label end" x=${this.width - 4} y="12">the first 32 micro-batches</text>` : nothing}
      ${lane.stages.map((passes, stage) => {
        const y = 18 + stage * (tall + 2);
        const [first = `stage ${stage}`, ...more] = members[stage] ?? [];
        const label = short(more.length ? `${first} + ${more.length}` : first, 14);
        return svg`<g><text class="label" x="0" y=${y + 12}>${label}</text>
          <rect class="bar-ground" x=${NAME} y=${y} width=${lane.seconds * scale} height=${tall} />
          ${passes.map((pass) => {
            const x = NAME + pass.start * scale;
            const wide = Math.max(0.5, (pass.stop - pass.start) * scale - 0.75);
            return svg`<rect class=${pass.kind} x=${x} y=${y} width=${wide} height=${tall} />${
              wide > 13
                ? svg`<text class="pass-text" x=${x + wide / 2} y=${y + 12}>${pass.micro_batch}</text>`
                : nothing
            }${
              wide > 13 && pass.kind === "backward"
                ? svg`<line class="pass-line" x1=${x + wide / 2 - 4} x2=${x + wide / 2 + 4} y1=${y + 14.5} y2=${y + 14.5} />`
                : nothing
            }`;
          })}</g>`;
      })}
    </svg>`;
  }
}

customElements.define("ed-plan-picture", PlanPicture);
customElements.define("ed-timeline", Timeline);
