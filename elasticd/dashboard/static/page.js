// @ts-check
/** The base of all pages: they ask for their value, again when news come, and say what went wrong. */

import { html, nothing } from "./vendor/lit.js";
import { Part } from "./element.js";
import { news } from "./news.js";
import { Refused, get } from "./source.js";
/** @import { PropertyDeclarations } from "./vendor/lit.js" */

/** Milliseconds between two requests for the same value. */
const LEAST = 700;

export class Page extends Part {
  static properties = /** @type {PropertyDeclarations} */ ({
    error: { state: true },
  });

  constructor() {
    super();
    /** Why values are not there, by path. @type {Record<string, string>} */ this.errors = {};
    /** @type {(() => void)[]} */ this.ends = [];
    /** @type {Map<string, {at: number, timer: number, running: boolean}>} */ this.asks = new Map();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    for (const end of this.ends.splice(0)) end();
    for (const ask of this.asks.values()) clearTimeout(ask.timer);
    this.asks.clear();
  }

  /** Until the page goes. @param {string} name  @param {(detail: any) => void} take */
  on(name, take) {
    /** @param {Event} event */
    const taken = (event) => take(/** @type {CustomEvent} */ (event).detail);
    news.addEventListener(name, taken);
    this.ends.push(() => news.removeEventListener(name, taken));
  }

  /** The page draws itself again whenever the cluster or the connection changes. */
  follow() {
    this.on("change", () => this.requestUpdate());
  }

  /** Asks for a value, but not more often than each so many milliseconds; the last wish is never lost.
   * @param {string} path  @param {(value: any) => void} take  @param {number} [least] */
  ask(path, take, least = LEAST) {
    const known = this.asks.get(path) ?? {
      at: -Infinity,
      timer: 0,
      running: false,
    };
    this.asks.set(path, known);
    clearTimeout(known.timer);
    const wait = known.at + least - performance.now();
    if (wait > 0 || known.running) {
      known.timer = setTimeout(() => this.ask(path, take, least), Math.max(wait, 50));
      return;
    }
    known.at = performance.now();
    known.running = true;
    get(path).then(
      (value) => {
        known.running = false;
        if (!this.isConnected) return;
        if (path in this.errors) this.fails(path, "");
        take(value);
      },
      (error) => {
        known.running = false;
        if (this.isConnected) this.fails(path, error instanceof Refused ? error.message : String(error));
      },
    );
  }

  /** @param {string} path  @param {string} why  empty: it does not any more */
  fails(path, why) {
    const { [path]: _, ...others } = this.errors;
    this.errors = why ? { ...others, [path]: why } : others;
  }

  /** Why something is not there; empty where all is. */
  get error() {
    return Object.values(this.errors)[0] ?? "";
  }

  trouble() {
    return this.error ? html`<p class="outcome bad" role="alert">✕ ${this.error}</p>` : nothing;
  }
}

/** @param {unknown} title  @param {string} question  @param {unknown} answer  @param {unknown} [beside] */
export const head = (title, question, answer, beside = nothing) =>
  html`<div class="page-head">
    <div class="grow">
      <h1 tabindex="-1">${title}</h1>
      <p class="question">${question}</p>
      <p class="answer">${answer}</p>
    </div>
    ${beside}
  </div>`;

/** @param {string} tone  ok, warn, bad, info, hollow or ""  @param {string} glyph  @param {unknown} words */
export const chip = (tone, glyph, words) =>
  html`<span class="chip ${tone}"
    >${glyph ? html`<span aria-hidden="true">${glyph}</span>` : nothing}${words}</span
  >`;

/** Facts beside each other. @param {[string, unknown][]} known */
export const facts = (known) =>
  html`<dl class="facts">
    ${known.map(
      ([name, value]) =>
        html`<div>
          <dt>${name}</dt>
          <dd>${value}</dd>
        </div>`,
    )}
  </dl>`;
