// @ts-check
/** Events as a list: when, what, and in whose words; each has its own address. */

import { html, nothing, repeat } from "./vendor/lit.js";
import { clock, moment, seconds } from "./format.js";
import { chip } from "./page.js";
import { jobHref, to } from "./source.js";
/** @import { EventRow } from "../tools/api.d.ts" */

/** Tone and sign of an event's kind; the others are plain. @type {Record<string, [string, string]>} */
const KINDS = {
  slow: ["warn", "▲"],
  link: ["warn", "▲"],
  worker_lost: ["bad", "✕"],
  node_down: ["bad", "✕"],
  fenced: ["bad", "✕"],
  raised: ["bad", "✕"],
  halted: ["bad", "‖"],
  defect: ["bad", "✕"],
  stopped: ["bad", "■"],
  aborted: ["bad", "✕"],
  refused: ["warn", "✕"],
  waiting: ["warn", "…"],
  chaos: ["warn", "⚡"],
  recovered: ["ok", "✓"],
  recorded: ["ok", "✓"],
  gained: ["ok", "✓"],
  finished: ["ok", "■"],
  node_up: ["ok", "✓"],
  joined: ["ok", "✓"],
  proposed: ["info", "⇄"],
  prepared: ["info", "⇄"],
  swapped: ["info", "⇄"],
  planning: ["info", "⇄"],
  drained: ["info", "▨"],
  leaving: ["info", "▨"],
  stopping: ["info", "■"],
  checkpoint: ["", "C"],
  snapshot: ["", "s"],
  configured: ["info", "✎"],
};

/**
 * @param {string} kind
 * @param {Record<string, unknown>} about The event's data: a job that ended as somebody wanted it is no fault.
 */
export const kindChip = (kind, about = {}) => {
  const [tone, glyph] = kind === "stopped" && about.orderly ? ["ok", "■"] : (KINDS[kind] ?? ["", "·"]);
  return chip(tone, glyph, kind.replaceAll("_", " "));
};

/** What is not said by the other columns. @param {EventRow} event */
function data(event) {
  const { traceback, stack, ...others } = event.data;
  const rest = Object.keys(others).length ? JSON.stringify(others, null, 1) : "";
  const long = traceback ?? stack;
  return rest || long
    ? html`<details>
        <summary>data</summary>
        <pre>${rest}${long ? `\n${long}` : ""}</pre>
      </details>`
    : nothing;
}

/** @param {EventRow[]} list
 * @param {{target?: number, dates?: boolean, jobs?: boolean, durations?: Record<string, number>}} [how]
 * `jobs`: say which job an event is about */
export const events = (list, how = {}) =>
  list.length === 0
    ? html`<p class="empty">Nothing.</p>`
    : html`<ul class="events">
        ${repeat(
          list,
          (event) => event.id,
          (event) =>
            html`<li id="event-${event.id}" class=${event.id === how.target ? "target" : ""}>
              <a
                class="at"
                href=${to(`/events?id=${event.id}`)}
                aria-label="Event ${event.id}, ${moment(event.time)}"
                >${how.dates ? moment(event.time) : clock(event.time)}</a
              >
              <span>${kindChip(event.kind, event.data)}</span>
              <span class="text"
                >${how.jobs && event.job ? html`<a href=${jobHref(event.job)}>${event.job}</a>: ` : nothing}${
                  event.text
                }${event.by ? html` <span class="muted">by ${event.by}</span>` : nothing}${
                  how.durations?.[event.kind] === undefined
                    ? nothing
                    : html` <span class="muted">after ${seconds(how.durations[event.kind])}</span>`
                }</span
              >
              ${data(event)}
            </li>`,
        )}
      </ul>`;
