// @ts-check
/** `/jobs/JOB`: how fast does it train, how fast could it, and where did the rest go? */

import { html, keyed, nothing } from "../vendor/lit.js";
import { NOTHING, age, clock, counted, number, percent, seconds, slowdown } from "../format.js";
import { news } from "../news.js";
import { Page, chip, facts, head } from "../page.js";
import "../experts.js";
import "../output.js";
import { deviceHref, part, planHref, recording, to } from "../source.js";
import { over, toned } from "./cluster.js";
/** @import { JobView, JobRow, LiveStep, RestartView, StageParts, StepColumns } from "../../tools/api.d.ts" */

/** What a step's seconds went into, in the order of a bar. */
export const PARTS = [
  { key: "forward", label: "forward", hue: 1 },
  { key: "backward", label: "backward", hue: 3 },
  { key: "blocks", label: "forward and backward", hue: 1 },
  { key: "recompute", label: "recompute", hue: 6 },
  { key: "embed and head", label: "embedding and head", hue: 6 },
  { key: "tp", label: "tensor parallel", hue: 4 },
  { key: "context", label: "context exchange", hue: 5 },
  { key: "bubble", label: "pipeline bubble", hue: 7 },
  { key: "reduction", label: "gradient reduction", hue: 2 },
  { key: "vote", label: "vote", hue: 8 },
  { key: "optimizer", label: "optimizer", hue: 5 },
  { key: "input", label: "waiting for data", hue: 2 },
  { key: "other", label: "other", hue: 7 },
];

const GLYPHS = {
  plan: "P",
  fault: "✕",
  slow: "▲",
  snapshot: "s",
  checkpoint: "C",
  change: "~",
};
/** Steps beyond which the columns are asked for anew, thinned out by the server. */
const MOST = 6000;

class JobPage extends Page {
  static properties = {
    job: { type: String },
    view: { state: true },
    columns: { state: true },
    device: { state: true },
  };

  constructor() {
    super();
    this.job = "";
    this.device = "";
    /** @type {JobView | null} */ this.view = null;
    /** @type {StepColumns | null} */ this.columns = null;
    /** @type {import("../chart.js").Mark[]} */ this.marks = [];
  }

  connectedCallback() {
    super.connectedCallback();
    const path = `/api/jobs/${part(this.job)}`;
    const view = (/** @type {number} */ least) =>
      this.ask(
        path,
        (value) => {
          this.view = value;
        },
        least,
      );
    const steps = (/** @type {number} */ least) =>
      this.ask(`${path}/steps`, (value) => this.charted(value), least);
    view(0);
    steps(0);
    this.on("hello", () => {
      view(500);
      steps(500);
    });
    this.on("step", (step) => {
      if (step.job !== this.job) return;
      this.stepped(step);
      view(3000);
      if (this.columns && (this.columns.step.length > MOST || this.columns.every > 1)) steps(5000);
    });
    this.on("event", (event) => {
      if (event.job === this.job) {
        view(700);
        steps(900);
      }
    });
    this.on("plan", (plan) => {
      if (plan.row.job === this.job) {
        view(700);
        steps(900);
      }
    });
    this.follow();
  }

  /** @param {StepColumns} columns */
  charted(columns) {
    this.columns = columns;
    const first = columns.step[0] ?? 0;
    this.marks = columns.marks
      .filter((mark) => mark.kind !== "snapshot")
      .map((mark) => ({
        x: mark.step ?? stepAt(columns, mark.time),
        glyph: GLYPHS[mark.kind],
        text: mark.text,
        href: to(`/events?id=${mark.event}`),
      }))
      .filter((mark) => mark.x >= first);
  }

  /** A step more, without asking for all of them. @param {LiveStep} step */
  stepped(step) {
    const known = this.columns;
    if (this.view) {
      const stages = step.stages.length ? { stages: step.stages, measured_step: step.measured_step } : {};
      this.view = { ...this.view, ...stages };
    }
    if (!known || known.every > 1) return;
    // A step that is done again takes the place of the earlier one, and of what came after it.
    const from =
      known.step.length && step.step <= known.step[known.step.length - 1]
        ? known.step.findIndex((each) => each >= step.step)
        : known.step.length;
    /** @template T @param {T[]} column  @param {T} value */
    const more = (column, value) => [...column.slice(0, from), value];
    this.columns = {
      ...known,
      step: more(known.step, step.step),
      time: more(known.time, step.time),
      plan: more(known.plan, step.plan),
      seconds: more(known.seconds, step.seconds),
      tokens_per_second: more(known.tokens_per_second, step.tokens_per_second),
      within_steps: more(known.within_steps, step.within_steps),
      predicted: more(known.predicted, step.predicted),
      bound: more(known.bound, step.bound),
      loss: more(known.loss, step.loss),
    };
  }

  render() {
    const view = this.view;
    if (!view) {
      return html`${head(this.job, "How fast does it train?", this.error ? "" : "Waiting …")}${this.trouble()}`;
    }
    const row = news.cluster?.jobs.find((job) => job.job === this.job) ?? view.head;
    const [tone, glyph] = toned(row.phase);
    if (view.restart) return this.restarting(view.restart, row);
    return html`${head(
        row.job,
        "How fast does it train, how fast could it, and where did the rest go?",
        html`${chip(tone, glyph, row.phase)} ${row.sentence}`,
        facts(this.known(row)),
      )}
      ${this.trouble()} ${view.exception ? raised(view.exception) : nothing}
      <p class="row">
        <a href=${to(`/jobs/${part(this.job)}/switch`)}>Switches</a>
        ${row.plan === null ? nothing : html`<a href=${planHref(this.job, row.plan)}>Plan ${row.plan}, and why</a>`}
        <a href=${to(`/events?job=${part(this.job)}`)}>Events</a>
      </p>
      <div class="panels">
        <section class="panel" aria-labelledby="speed-title">
          <header>
            <h2 id="speed-title">Throughput</h2>
            <p>
              of each step: over wall time, and within the step alone, as predicted and bound are; bound: the
              computation of the step divided over all devices by their slowdown, with no time for anything else
            </p>
          </header>
          ${this.speed(row)}
        </section>
        <section class="panel half" aria-labelledby="step-title">${this.stages(view, row)}</section>
        <section class="panel half" aria-labelledby="time-title">${this.spent(view, row)}</section>
        <section class="panel half" aria-labelledby="loss-title">
          <header><h2 id="loss-title">Loss</h2></header>
          ${this.loss(row)}
        </section>
        <section class="panel half" aria-labelledby="data-title">${data(view)}</section>
        ${view.experts ? experts(view.experts) : nothing}
        <section class="panel half" aria-labelledby="members-title">${members(view)}</section>
        <section class="panel half" aria-labelledby="kept-title">${kept(view)}</section>
      </div>`;
  }

  /** @param {JobRow} row @returns {[string, unknown][]} */
  known(row) {
    const of = (/** @type {number | null} */ most) =>
      row.within_steps && most ? percent(row.within_steps / most, 0) : NOTHING;
    return [
      ["step", number(row.step)],
      ["loss", number(row.loss, 4)],
      ["tokens/s", html`${number(row.tokens_per_second)} <small>mean of 10 steps</small>`],
      [
        "within steps",
        html`${number(row.within_steps)}
        ${row.within_steps ? html`<small>the last: ${of(row.predicted)} of predicted, ${of(row.bound)} of bound</small>` : nothing}`,
      ],
      ["ETTR", percent(row.ettr)],
      ["goodput", percent(row.goodput)],
      ["plan", row.plan === null ? "–" : String(row.plan)],
      ["devices", html`${row.devices}${row.standby ? html` <small>+${row.standby} standby</small>` : nothing}`],
    ];
  }

  /** A job whose workers tell the leader nothing of plans: it has neither. @param {RestartView} known  @param {JobRow} row */
  restarting(known, row) {
    const [tone, glyph] = toned(row.phase);
    const device = known.devices.find((each) => each.device === this.device) ?? known.devices[0];
    const watched = row.step !== null;
    const place = device ? device.device.lastIndexOf("/") : 0;
    return html`${head(
        row.job,
        "Does it run, on which devices, and what do its workers write?",
        html`${chip(tone, glyph, row.phase)} ${row.sentence}`,
        facts([
          ["workers", known.workers ? number(known.workers) : NOTHING],
          ["nodes", known.nodes.length ? known.nodes.join(", ") : NOTHING],
          ["started again", counted(known.restarts, "time")],
          ...(watched
            ? /** @type {[string, unknown][]} */ ([
                ["steps since its start", number(row.step)],
                ["seconds a step", seconds(known.step_seconds)],
              ])
            : []),
        ]),
      )}
      ${this.trouble()}
      <p class="row">
        <a href=${to(`/events?job=${part(this.job)}`)}>Events</a>
      </p>
      <div class="panels">
        ${known.failure ? failure(known) : nothing}
        ${
          known.devices.length
            ? html`<section class="panel ${recording ? "" : "third"}" aria-labelledby="restart-title">
                ${restart(known, (name) => {
                  this.device = name;
                })}
              </section>`
            : nothing
        }
        ${
          device && !recording
            ? html`<section class="panel two-thirds" aria-labelledby="output-title">
                ${keyed(
                  device.device,
                  html`<ed-output
                    .node=${device.device.slice(0, place)}
                    .rank=${device.device.slice(place + 1)}
                    .of=${row.job}
                  ></ed-output>`,
                )}
              </section>`
            : nothing
        }
      </div>`;
  }

  /** @param {JobRow} row */
  speed(row) {
    if (!this.columns || !this.columns.step.length) return noStep(row);
    const columns = broken(this.columns);
    return html`<ed-chart
      label="Throughput"
      unit="tokens/s"
      .x=${columns.step}
      .height=${240}
      .marks=${this.marks}
      .curves=${[
        { label: "over wall time", hue: 1, values: columns.tokens_per_second },
        {
          label: "within steps",
          hue: 5,
          dash: [12, 3],
          values: columns.within_steps,
        },
        {
          label: "predicted",
          hue: 2,
          dash: [8, 4],
          values: columns.predicted,
          guess: true,
        },
        { label: "bound", hue: 3, dash: [2, 4], values: columns.bound },
      ]}
    ></ed-chart>`;
  }

  /** @param {JobRow} row */
  loss(row) {
    if (!this.columns || !this.columns.step.length) return noStep(row);
    const columns = broken(this.columns);
    return html`<ed-chart
      label="Loss"
      unit="mean per token"
      .x=${columns.step}
      .height=${180}
      .curves=${[{ label: "loss", hue: 4, values: columns.loss }]}
    ></ed-chart>`;
  }

  /** @param {JobView} view  @param {JobRow} row */
  stages(view, row) {
    const several = {
      module: new Set(view.stages.map((each) => each.module)).size > 1,
      lane: view.stages.some((each) => each.lane > 0),
    };
    return html`<header>
        <h2 id="step-title">The last step, by stage</h2>
        <p>
          ${view.measured_step === null ? nothing : `step ${view.measured_step}, `}the slowest device of each
          stage
        </p>
      </header>
      ${
        view.stages.length
          ? html`<ed-bars
                label="Seconds of the last step by stage"
                .kinds=${PARTS}
                .rows=${view.stages.map((stage) => ({
                  label: stageName(stage, several),
                  note: `${seconds(stage.total)}  ${stage.slowest}`,
                  parts: stage.seconds,
                }))}
              ></ed-bars>
              ${view.lanes.length ? lanes(view) : nothing}`
          : html`<p class="empty">
              ${
                over(row) && row.step
                  ? "Not kept: the leader that saw the job's last step no longer leads."
                  : "Not measured yet."
              }
            </p>`
      }`;
  }

  /** @param {JobView} view  @param {JobRow} row */
  spent(view, row) {
    const slow = view.slowness_seconds ?? 0;
    const lost = view.lost.reduce((sum, each) => sum + each.seconds, 0);
    const healthy = Math.max(0, view.productive_seconds - slow);
    return html`<header>
        <h2 id="time-title">Where the time went</h2>
        <p>${age(view.wall_seconds)} of wall time; ETTR is the part in steps that count</p>
      </header>
      <ed-bars
        share
        label="Wall time"
        .kinds=${[
          { key: "healthy", label: "steps at healthy speed", hue: 3 },
          { key: "slow", label: "slowness", hue: 8 },
          { key: "lost", label: "no step", hue: 2 },
        ]}
        .rows=${[{ label: "wall time", note: age(view.wall_seconds), parts: { healthy, slow, lost } }]}
      ></ed-bars>
      ${
        view.lost.length
          ? html`<table class="data">
              <caption>
                Lost, by cause
              </caption>
              <thead>
                <tr>
                  <th scope="col">cause</th>
                  <th scope="col" class="num">time</th>
                  <th scope="col" class="num">of wall</th>
                  <th scope="col" class="num">times</th>
                </tr>
              </thead>
              <tbody>
                ${view.lost.map(
                  (each) =>
                    html`<tr>
                      <th scope="row">${each.cause}</th>
                      <td class="num">${seconds(each.seconds)}</td>
                      <td class="num">${percent(each.seconds / (view.wall_seconds || 1))}</td>
                      <td class="num">${number(each.times)}</td>
                    </tr>`,
                )}
              </tbody>
            </table>`
          : html`<p class="empty">Nothing was lost.</p>`
      }
      <p class="small muted">
        ETTR ${percent(row.ettr)}, goodput
        ${percent(row.goodput)}${
          view.healthy_seconds === null
            ? nothing
            : `; a step takes ${seconds(view.healthy_seconds)} at the healthy speed`
        }${view.repeated_steps ? `; ${counted(view.repeated_steps, "step")} done again` : nothing}
      </p>`;
  }
}

/** Columns with a point without values where steps are not known, so that no line is drawn over them.
 * @param {StepColumns} columns */
function broken(columns) {
  const { step, every } = columns;
  const gaps = new Set(step.map((_, i) => i).filter((i) => i > 0 && step[i] - step[i - 1] > 1.5 * every));
  if (!gaps.size) return columns;
  /** @template T @param {T[]} column  @param {(i: number) => T} between */
  const apart = (column, between) =>
    column.flatMap((value, i) => (gaps.has(i) ? [between(i), value] : [value]));
  const unknown = () => null;
  return {
    ...columns,
    step: apart(step, (i) => step[i - 1] + every),
    tokens_per_second: apart(columns.tokens_per_second, unknown),
    within_steps: apart(columns.within_steps, unknown),
    predicted: apart(columns.predicted, unknown),
    bound: apart(columns.bound, unknown),
    loss: apart(columns.loss, unknown),
  };
}

/** @param {JobRow} row */
const noStep = (row) => html`<p class="empty">${over(row) ? "No step is kept." : "No step yet."}</p>`;

/** The step that a moment belongs to. @param {StepColumns} columns  @param {number} time */
function stepAt(columns, time) {
  let low = 0;
  let high = columns.time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (columns.time[middle] < time) low = middle + 1;
    else high = middle;
  }
  return columns.step[Math.min(low, columns.step.length - 1)] ?? 0;
}

/** @param {StageParts} stage  @param {{module: boolean, lane: boolean}} several */
function stageName(stage, several) {
  const module = several.module ? `${stage.module} ` : "";
  return `${module}p${stage.pipeline}${several.lane ? `.${stage.lane}` : ""} ${module ? "s" : "stage "}${stage.stage}`;
}

/** @param {JobView} view */
const lanes = (view) =>
  html`<table class="data">
    <caption>
      Lanes of pipelines: slowdown agreed by the workers, and share of the step
    </caption>
    <thead>
      <tr>
        <th scope="col">lane</th>
        <th scope="col">devices</th>
        <th scope="col" class="num">slowdown</th>
        <th scope="col" class="num">micro-batches</th>
      </tr>
    </thead>
    <tbody>
      ${view.lanes.map(
        (lane) =>
          html`<tr>
            <th scope="row">p${lane.pipeline} lane ${lane.lane}</th>
            <td class="mono">${lane.devices.join(" ")}</td>
            <td class="num">${slowdown(lane.slowdown)}</td>
            <td class="num">${lane.rows}</td>
          </tr>`,
      )}
    </tbody>
  </table>`;

/** @param {import("../../tools/api.d.ts").ExpertsView} view */
const experts = (view) =>
  html`<section class="panel" aria-labelledby="experts-title">
    <header>
      <h2 id="experts-title">Experts by load</h2>
      <p>
        rows of each expert over the mean of its block, in the mean of the last reports; darker, in dark mode
        brighter: more rows
      </p>
    </header>
    <ed-experts .view=${view}></ed-experts>
  </section>`;

/** @param {JobView} view */
function data(view) {
  const batch = view.batch;
  return html`<header>
      <h2 id="data-title">Sequence lengths and batches</h2>
    </header>
    ${
      batch
        ? facts([
            ["global batch", html`${number(batch.samples)} <small>samples</small>`],
            ["micro-batch", number(batch.micro_batch)],
            ["by pipeline", batch.by_pipeline.join(" + ") || "–"],
            .../** @type {[string, unknown][]} */ (
              batch.sequences === null || batch.sequences === undefined
                ? []
                : [
                    ["packed", html`${number(batch.sequences)} <small>sequences</small>`],
                    ["cut", html`${number(batch.cut)} <small>sequences</small>`],
                    ["imbalance", number(batch.imbalance, 2)],
                  ]
            ),
          ])
        : html`<p class="empty">${over(view.head) ? "No batch is kept." : "No batch yet."}</p>`
    }
    ${
      view.lengths && view.lengths.now.length
        ? html`<ed-lengths .lengths=${view.lengths}></ed-lengths>`
        : html`<p class="empty">
            ${view.lengths && view.lengths.mean !== null ? html`${number(view.lengths.mean)} tokens in the mean. ` : nothing}The
            lengths of the last step are not known.
          </p>`
    }`;
}

/** @param {JobView} view */
const members = (view) =>
  html`<header>
      <h2 id="members-title">Workers</h2>
      <p>${counted(view.members.length, "process", "processes")}</p>
    </header>
    <div
      class="scroll tall"
      tabindex="0"
      role="group"
      aria-label="Workers"
      ?hidden=${view.members.length === 0}
    >
      <table class="data">
        <thead>
          <tr>
            <th scope="col" class="num">rank</th>
            <th scope="col">device</th>
            <th scope="col">role</th>
            <th scope="col" class="num">pid</th>
            <th scope="col">computes on</th>
            <th scope="col">over</th>
          </tr>
        </thead>
        <tbody>
          ${view.members.map(
            (each) =>
              html`<tr>
                <td class="num">${each.rank ?? "–"}</td>
                <th scope="row">
                  <a class="mono" href=${deviceHref(each.device)}>${each.device}</a>
                </th>
                <td>
                  ${each.hung ? chip("bad", "‖", `hangs: ${each.hung}`) : each.role === "state" ? "keeps state" : each.role}
                </td>
                <td class="num">${each.pid}</td>
                <td>${each.computes_on || "–"}</td>
                <td>${each.transport || "–"}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;

/** @param {JobView} view */
const kept = (view) =>
  html`<header><h2 id="kept-title">Snapshots and checkpoints</h2></header>
    ${
      view.kept.length === 0
        ? html`<p class="empty">None: a fault that takes the last copy of a part of the state ends the job.</p>`
        : html`<div class="scroll tall" tabindex="0" role="group" aria-label="Snapshots and checkpoints">
            <table class="data">
              <thead>
                <tr>
                  <th scope="col">what</th>
                  <th scope="col" class="num">step</th>
                  <th scope="col">time</th>
                  <th scope="col">folder</th>
                </tr>
              </thead>
              <tbody>
                ${view.kept.slice(0, 30).map(
                  (each) =>
                    html`<tr>
                      <th scope="row">${each.kind}</th>
                      <td class="num">${number(each.step)}</td>
                      <td>${clock(each.time)}</td>
                      <td class="mono words">${each.name || "memory of two nodes"}</td>
                    </tr>`,
                )}
              </tbody>
            </table>
          </div>`
    }`;

/** @param {NonNullable<JobView["exception"]>} exception */
const raised = (exception) =>
  html`<section class="panel" aria-labelledby="raised-title">
    <header>
      <h2 id="raised-title">The script raised ${exception.kind}</h2>
      <p>
        step ${exception.step} on
        <a href=${deviceHref(exception.device)}>${exception.device}</a>
      </p>
    </header>
    <p>${exception.message}</p>
    <details>
      <summary>Traceback</summary>
      <pre class="why">${exception.traceback}</pre>
    </details>
  </section>`;

/** @param {RestartView} known */
const failure = (known) =>
  html`<section class="panel" aria-labelledby="failure-title">
    <header><h2 id="failure-title">The last failure of a worker</h2></header>
    <pre class="why">${known.failure}</pre>
  </section>`;

/** @param {RestartView} known  @param {(device: string) => void} choose */
function restart(known, choose) {
  const watched = known.devices.some((each) => each.seconds !== null);
  return html`<header>
      <h2 id="restart-title">Devices</h2>
      <p>${known.round === null ? nothing : `round ${known.round} of the rendezvous`}</p>
    </header>
    <table class="data">
      <thead>
        <tr>
          <th scope="col">device</th>
          ${
            watched
              ? html`<th scope="col" class="num">own seconds</th>
                  <th scope="col" class="num">to the others</th>`
              : nothing
          }
          ${recording ? nothing : html`<th scope="col">output</th>`}
        </tr>
      </thead>
      <tbody>
        ${known.devices.map(
          (each) =>
            html`<tr>
              <th scope="row">
                <a class="mono" href=${deviceHref(each.device)}>${each.device}</a>
              </th>
              ${
                watched
                  ? html`<td class="num">${seconds(each.seconds)}</td>
                      <td class="num">${slowdown(each.ratio)}</td>`
                  : nothing
              }
              ${
                recording
                  ? nothing
                  : html`<td>
                      <button class="quiet" @click=${() => choose(each.device)}>show</button>
                    </td>`
              }
            </tr>`,
        )}
      </tbody>
    </table>
    ${Object.entries(known.out).map(
      ([name, reason]) => html`<p>${chip("warn", "▲", `${name} is out`)} ${reason}</p>`,
    )}
    ${
      watched
        ? nothing
        : html`<p class="small muted">
            Its script says nothing of steps: a line
            <code>elasticd.watch()</code> does.
          </p>`
    }`;
}

customElements.define("ed-job", JobPage);
