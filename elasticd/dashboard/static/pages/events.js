// @ts-check
/** `/events`: what happened, in which order? */

import { html, nothing } from "../vendor/lit.js";
import { events, kindChip } from "../event-list.js";
import { counted, moment, seconds } from "../format.js";
import { Page, head } from "../page.js";
import { get, jobHref, planHref, recording, to } from "../source.js";
/** @import { EventGroup, EventPage, EventRow } from "../../tools/api.d.ts" */

const FILTERS = /** @type {const} */ (["kind", "job", "node", "device"]);
/** Events of one page. */
const LIMIT = 200;
/** Events that the page keeps. */
const MOST = 5000;

class EventsPage extends Page {
  static properties = {
    search: { type: String },
    view: { state: true },
    list: { state: true },
    grouped: { state: true },
  };

  constructor() {
    super();
    this.search = "";
    /** @type {EventPage | null} */ this.view = null;
    /** Newest first. @type {EventRow[]} */ this.list = [];
    /** @type {EventGroup[]} */ this.groups = [];
    /** @type {number | null} */ this.further = null;
    this.grouped = false;
    /** @type {Record<string, string>} */ this.filter = {};
    this.target = 0;
    this.newer = "";
  }

  connectedCallback() {
    super.connectedCallback();
    const asked = new URLSearchParams(this.search);
    for (const name of FILTERS) this.filter[name] = asked.get(name) ?? "";
    this.target = Number(asked.get("id")) || 0;
    this.load();
    this.on("hello", () => this.load());
    this.on("event", (event) => this.happened(event));
  }

  /** @param {number} [before] */
  path(before) {
    const query = new URLSearchParams({ limit: String(LIMIT) });
    for (const name of FILTERS) if (this.filter[name]) query.set(name, this.filter[name]);
    if (before) query.set("before", String(before));
    return `/api/events?${query}`;
  }

  load() {
    if (recording) {
      this.ask("/api/events", (page) => this.taken(page, true));
      return;
    }
    const path = this.path(this.target ? this.target + 1 : undefined);
    this.newer = path;
    // The newest page; while older ones are shown they stay, and what is new is put before them.
    this.ask(
      path,
      (page) => {
        if (this.newer === path) this.taken(page, false);
      },
      200,
    );
  }

  /** @param {EventPage} page  @param {boolean} whole */
  taken(page, whole) {
    this.view = page;
    const oldest = page.events.length ? page.events[page.events.length - 1].id : 0;
    const kept = this.list.filter((event) => event.id < oldest && this.wanted(event));
    const newer = this.list.filter((event) => page.events.length && event.id > page.events[0].id);
    if (whole || !kept.length) this.further = page.before;
    this.list = merged([...newer, ...page.events, ...kept]);
    this.groups = page.groups;
    if (this.target)
      this.updateComplete.then(() =>
        document.getElementById(`event-${this.target}`)?.scrollIntoView({ block: "center" }),
      );
  }

  async more() {
    if (!this.further) return;
    /** @type {EventPage} */
    const page = await get(this.path(this.further));
    this.further = page.before;
    this.groups = [...this.groups, ...page.groups];
    this.list = merged([...this.list, ...page.events]);
  }

  /** @param {EventRow} event */
  wanted(event) {
    const { kind, job, node, device } = this.filter;
    return (
      (!kind || kind.split(",").includes(event.kind)) &&
      (!job || event.job === job) &&
      (!node || event.node === node) &&
      (!device || event.device === device)
    );
  }

  /** @param {EventRow} event */
  happened(event) {
    if (this.target || !this.wanted(event)) return;
    this.list = merged([event, ...this.list]).slice(0, MOST);
    if (this.grouped) this.load();
  }

  /** @param {string} name  @param {string} value */
  choose(name, value) {
    this.filter[name] = value;
    this.target = 0;
    const query = new URLSearchParams(Object.entries(this.filter).filter(([, each]) => each));
    if (!recording) history.replaceState(null, "", to(`/events${query.size ? `?${query}` : ""}`));
    if (recording) {
      this.requestUpdate();
      return;
    }
    this.list = [];
    this.groups = [];
    this.further = null;
    this.load();
  }

  export() {
    const lines = this.shown()
      .map((event) => JSON.stringify(event))
      .join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${lines}\n`], { type: "application/jsonl" }));
    link.download = "elasticd-events.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  shown() {
    return this.list.filter((event) => this.wanted(event));
  }

  render() {
    const view = this.view;
    const shown = this.shown();
    const first = shown[0];
    const jobs = (view?.jobs.length ?? 0) > 1;
    return html`${head(
        "Events",
        "What happened, in which order?",
        this.target
          ? html`Event ${this.target}, and what came before it. <a href=${to("/events")}>The newest</a>`
          : view
            ? html`${counted(shown.length, "event")} shown, newest
              first${first ? html`: ${first.text}` : nothing}`
            : "Waiting …",
      )}
      ${this.trouble()}
      <section class="panel" aria-label="Events">
        <form class="row" @submit=${(/** @type {Event} */ event) => event.preventDefault()}>
          ${this.select("kind", view?.kinds ?? [])}${this.select("job", view?.jobs ?? [])}
          ${this.select("node", view?.nodes ?? [])} ${this.filter.device ? this.device() : nothing}
          <div class="segmented" role="group" aria-label="How events are shown">
            <button
              type="button"
              aria-pressed=${this.grouped ? "false" : "true"}
              @click=${() => {
                this.grouped = false;
              }}
            >
              one by one
            </button>
            <button
              type="button"
              aria-pressed=${this.grouped ? "true" : "false"}
              @click=${() => {
                this.grouped = true;
                this.load();
              }}
            >
              grouped
            </button>
          </div>
          <span class="grow"></span>
          <button type="button" ?disabled=${shown.length === 0} @click=${() => this.export()}>
            Export JSON lines
          </button>
        </form>
        <div class="stack after-form">
          ${this.grouped ? this.groups.map(group) : events(shown, { target: this.target, dates: true, jobs })}
        </div>
        ${this.grouped && !this.groups.length ? html`<p class="empty">No events belong together here.</p>` : nothing}
        ${
          this.further
            ? html`<button @click=${() => this.more()}>Older events</button>`
            : view && !this.target
              ? html`<p class="small muted">
                  ${view.oldest === null ? "" : `The oldest that is kept: ${moment(view.oldest)}.`}
                </p>`
              : nothing
        }
      </section>`;
  }

  device() {
    const chosen = (/** @type {any} */ event) => this.choose("device", event.target.value);
    return html`<label>device<input .value=${this.filter.device} @change=${chosen} /></label>`;
  }

  /** @param {"kind" | "job" | "node"} name  @param {string[]} choices */
  select(name, choices) {
    const value = this.filter[name];
    const all = value && !choices.includes(value) ? [value, ...choices] : choices;
    return html`<label
      >${name}<select @change=${(/** @type {any} */ event) => this.choose(name, event.target.value)}>
        <option value="" ?selected=${!value}>all</option>
        ${all.map((each) => html`<option value=${each} ?selected=${each === value}>${each}</option>`)}
      </select></label
    >`;
  }
}

/** Newest first, each once. @param {EventRow[]} list */
function merged(list) {
  const found = new Map(list.map((event) => [event.id, event]));
  return [...found.values()].sort((a, b) => b.id - a.id);
}

/** @param {EventGroup} known */
const group = (known) =>
  html`<details class="group">
    <summary>
      <span class="muted">${moment(known.start)}</span> <b>${known.title}</b>
      ${known.job ? html` <a href=${jobHref(known.job)}>${known.job}</a>` : nothing}
      ${known.job && known.plan !== null ? html` <a href=${planHref(known.job, known.plan)}>plan ${known.plan}</a>` : nothing}
      <span class="muted"
        >${counted(known.events.length, "event")} in ${seconds(known.stop - known.start)}</span
      >
      <span class="kinds"
        >${[...new Set(known.events.map((event) => event.kind))].map((kind) => kindChip(kind))}</span
      >
    </summary>
    ${events(known.events, { durations: known.durations })}
  </details>`;

customElements.define("ed-events", EventsPage);
