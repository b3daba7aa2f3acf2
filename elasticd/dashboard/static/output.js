// @ts-check
/** What a device's worker writes: the newest of it, and on as it comes. */

import { html } from "./vendor/lit.js";
import { Part } from "./element.js";
import { get, part } from "./source.js";
/** @import { OutputView } from "../tools/api.d.ts" */

/** Characters that stay on the page, bytes to begin with, and milliseconds between two looks. */
const MOST = 100_000;
const FIRST = 16_384;
const EVERY = 2000;
/** What colours text in a terminal, or moves its cursor. */
const ESCAPES = /\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))/g;

class Output extends Part {
  static properties = {
    node: { type: String },
    rank: { type: String },
    of: { type: String },
    text: { state: true },
    why: { state: true },
  };

  constructor() {
    super();
    this.node = "";
    this.rank = "";
    /** The job whose output is shown; empty: the newest one of the device. */
    this.of = "";
    this.text = "";
    this.why = "Waiting …";
    this.job = "";
    this.seen = -FIRST;
    /** @type {number | undefined} */ this.timer = undefined;
    this.atEnd = true;
  }

  connectedCallback() {
    super.connectedCallback();
    this.look();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearTimeout(this.timer);
  }

  /** Asks for what is new, and again a little later. */
  async look() {
    let more = false;
    try {
      if (!document.hidden) {
        const path = `/api/devices/${part(this.node)}/${part(this.rank)}/output?after=${this.seen}&job=${part(this.of)}`;
        /** @type {OutputView} */ const found = await get(path);
        more = this.take(found);
      }
    } catch (error) {
      this.why = error instanceof Error ? error.message : String(error);
    }
    if (this.isConnected) this.timer = setTimeout(() => this.look(), more ? 50 : EVERY);
  }

  /** Whether there may be more at once. @param {OutputView} found */
  take(found) {
    if (found.job !== this.job || found.end < this.seen) {
      const anew = this.job !== "";
      this.job = found.job;
      this.text = "";
      if (anew) {
        this.seen = -FIRST;
        return true;
      }
    }
    if (this.seen >= 0 && found.begin > this.seen) this.text += "\n… (overwritten before it was read)\n";
    this.seen = found.end;
    if (found.text) this.text = (this.text + found.text).slice(-MOST);
    this.why = this.text ? "" : "It has written nothing yet.";
    return found.text.length > 0 && found.end > found.begin;
  }

  updated() {
    const lines = this.querySelector("pre");
    if (lines && this.atEnd) lines.scrollTop = lines.scrollHeight;
  }

  willUpdate() {
    const lines = this.querySelector("pre");
    /** Whoever has scrolled back reads on there. */
    this.atEnd = !lines || lines.scrollTop + lines.clientHeight > lines.scrollHeight - 20;
  }

  render() {
    return html`<header>
        <h2 id="output-title">
          What ${this.of ? `the worker of ${this.node}/${this.rank}` : "its worker"} writes
        </h2>
        <p>${this.job ? html`job ${this.job}, the newest last` : "the newest last"}</p>
      </header>
      ${
        this.text
          ? html`<pre class="output scroll tall" tabindex="0" aria-labelledby="output-title">
${shown(this.text)}</pre>`
          : html`<p class="empty">${this.why}</p>`
      }`;
  }
}

/** Lines as a terminal would show them: of a progress bar its last state. @param {string} text */
function shown(text) {
  return text
    .replace(ESCAPES, "")
    .split("\n")
    .map((line) => {
      const states = line.replace(/\r+$/, "").split("\r");
      return states[states.length - 1];
    })
    .join("\n");
}

customElements.define("ed-output", Output);
