// @ts-check
/** `/act`: what can be done, and how from a shell? */

import { html, live, nothing } from "../vendor/lit.js";
import { Part } from "../element.js";
import { capital, moment } from "../format.js";
import { Page, chip, head } from "../page.js";
import { Refused, asked } from "../source.js";
/** @import { Act, Acted, ActList, ConfigView } from "../../tools/api.d.ts" */

/** The panels, by the beginnings of the names of what they have. @type {[string, string, string[]][]} */
const PANELS = [
  ["Nodes", "Jobs leave a drained node without a stall; then it can be stopped.", ["drain", "undrain"]],
  ["Replanning", "While it is paused, faults and drains are still answered.", ["pause", "resume"]],
  [
    "Jobs",
    "The command of a stopped job starts it again, from its newest checkpoint.",
    ["checkpoint", "stop", "forget"],
  ],
  ["Chaos", "Harm on purpose, for trials.", ["chaos"]],
  [
    "Configuration",
    "Detection and policy, changed while everything runs; kept in etcd, over what the file says.",
    ["config"],
  ],
];
/** Choices above which a name is typed. */
const MOST = 300;
/** Fields that hold numbers, and those that may be left empty. */
const NUMBERS = ["factor", "seconds"];
const OPTIONAL = ["value", "seconds", "factor", "other"];
/** What stands in a field at first, and holds where it is emptied, by act and field: the command line's defaults.
 * @type {Record<string, string>} */
const FIRST = { "stop seconds": "600", "chaos-slow factor": "3" };

class ActPage extends Page {
  static properties = { list: { state: true }, config: { state: true } };

  constructor() {
    super();
    /** @type {ActList | null} */ this.list = null;
    /** @type {ConfigView | null} */ this.config = null;
  }

  connectedCallback() {
    super.connectedCallback();
    this.again();
    this.on("hello", () => this.again());
    this.on("event", (event) => {
      if (
        [
          "configured",
          "node_up",
          "node_down",
          "drained",
          "joined",
          "finished",
          "stopped",
          "forgotten",
        ].includes(event.kind)
      )
        this.again();
    });
    this.on("plan", () => this.again());
  }

  again() {
    this.ask("/api/act", (value) => {
      this.list = value;
    });
    this.ask("/api/config", (value) => {
      this.config = value;
    });
  }

  render() {
    const list = this.list;
    const question = "What can be done, and how from a shell?";
    if (!list) return html`${head("Act", question, this.error ? "" : "Waiting …")}${this.trouble()}`;
    const { viewer } = list;
    const refused = list.acts.filter((act) => !act.allowed);
    const reasons = new Set(refused.map((act) => act.why_not));
    return html`${head(
        "Act",
        question,
        viewer.role === "viewer"
          ? html`${chip("info", "○", "viewer")} You may look. ${[...reasons][0] ?? ""}`
          : html`${viewer.name ? html`You act as ${chip("ok", "✓", `${viewer.name}, ${viewer.role}`)}. ` : nothing}Everything
            here is done by the leader, in your name, and is among the events.`,
      )}
      ${this.trouble()}
      <div class="panels">
        ${PANELS.map(([title, words, names]) => {
          const acts = list.acts.filter((act) =>
            names.some(
              (name) => act.name === name || act.name.startsWith(`${name}-`) || act.name.startsWith(`${name}/`),
            ),
          );
          if (!acts.length && title !== "Configuration") return nothing;
          return html`<section class="panel ${title === "Configuration" ? "" : "half"}" aria-label=${title}>
            <header>
              <h2>${title}</h2>
              <p>${words}</p>
            </header>
            <div class="stack acts">
              ${acts.map((act) => html`<ed-act .act=${act} @done=${() => this.again()}></ed-act>`)}
            </div>
            ${title === "Configuration" && this.config ? config(this.config) : nothing}
          </section>`;
        })}
      </div>`;
  }
}

/** @param {ConfigView} known */
const config = (known) =>
  html`<div class="panels config">
    <div class="half">
      <div class="scroll tall" tabindex="0" role="group" aria-label="Values in force">
        <table class="data">
          <caption>
            In force
          </caption>
          <thead>
            <tr>
              <th scope="col">key</th>
              <th scope="col" class="num">value</th>
              <th scope="col">source</th>
            </tr>
          </thead>
          <tbody>
            ${known.values.map(
              (each) =>
                html`<tr>
                  <th scope="row" class="mono">${each.key}</th>
                  <td class="num mono">${String(each.value)}</td>
                  <td>${each.changed ? chip("info", "✎", "changed while running") : nothing}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      </div>
    </div>
    <div class="half">
      <div class="scroll tall" tabindex="0" role="group" aria-label="Changes">
        <table class="data">
          <caption>
            Changes, the newest first
          </caption>
          <thead>
            <tr>
              <th scope="col" class="num">no.</th>
              <th scope="col">when</th>
              <th scope="col">by</th>
              <th scope="col">difference</th>
            </tr>
          </thead>
          <tbody>
            ${
              known.history.length === 0
                ? html`<tr>
                    <td colspan="4" class="muted">None: all is as in the file.</td>
                  </tr>`
                : known.history.map(
                    (each) =>
                      html`<tr>
                        <td class="num">${each.number}</td>
                        <td class="nowrap">${moment(each.time)}</td>
                        <td class="words">${each.by}</td>
                        <td class="mono words">
                          ${Object.entries(each.set).map(([key, value]) => html`+ ${key} = ${String(value)}<br />`)}
                          ${each.unset.map((key) => html`− ${key}<br />`)}
                        </td>
                      </tr>`,
                  )
            }
          </tbody>
        </table>
      </div>
    </div>
  </div>`;

/** One thing that can be done: its fields, its command line, its outcome. */
class ActForm extends Part {
  static properties = {
    act: { attribute: false },
    values: { state: true },
    typed: { state: true },
    outcome: { state: true },
    running: { state: true },
  };

  constructor() {
    super();
    /** @type {Act | null} */ this.act = null;
    /** @type {Record<string, string>} */ this.values = {};
    this.typed = "";
    /** @type {{good: boolean, text: string} | null} */ this.outcome = null;
    this.running = false;
  }

  /** @param {string} field */
  value(field) {
    const act = /** @type {Act} */ (this.act);
    const known = this.values[field] ?? FIRST[`${act.name} ${field}`];
    const choices = act.choices[field] ?? [];
    // A choice may be gone by now: a job that is over, a node that left.
    const free = !choices.length || choices.length > MOST;
    if (known !== undefined && (free || choices.includes(known) || known === "")) return known;
    return OPTIONAL.includes(field) || choices.length > MOST ? "" : (choices[0] ?? "");
  }

  /** What holds of a field: it is in the command line that is shown, and in what is sent.
   * @param {string} field */
  given(field) {
    const act = /** @type {Act} */ (this.act);
    return this.value(field).trim() || FIRST[`${act.name} ${field}`] || "";
  }

  /** The command line as it is with these fields. */
  command() {
    const act = /** @type {Act} */ (this.act);
    const unset = act.name === "config" && this.given("value") === "";
    let line = unset ? "elasticd config unset KEY" : act.command;
    line = line.replace(/\[([^\]]*)\] /g, (_, part) => {
      const field = act.fields.find((each) => part.endsWith(each.toUpperCase()));
      return field && this.given(field) ? `${part} ` : "";
    });
    for (const field of act.fields) {
      const value = this.given(field);
      if (value) line = line.replace(new RegExp(`\\b${field.toUpperCase()}\\b`), () => quoted(value));
    }
    return line;
  }

  body() {
    const act = /** @type {Act} */ (this.act);
    /** @type {Record<string, unknown>} */
    const body = {};
    for (const field of act.fields) {
      const text = this.given(field);
      if (field === "value") body.value = text === "" ? null : typed(field, text);
      else if (text !== "") body[field] = typed(field, text);
    }
    if (act.confirm) body.confirm = this.typed;
    return body;
  }

  /** @param {Event} event */
  async submit(event) {
    event.preventDefault();
    const act = /** @type {Act} */ (this.act);
    if (!act.allowed || this.running || (act.confirm && this.typed !== this.value(act.confirm))) return;
    this.running = true;
    this.outcome = null;
    try {
      const done = /** @type {Acted} */ (await asked("POST", `/api/act/${act.name}`, this.body()));
      this.outcome = { good: true, text: `Done: ${done.command}` };
      this.typed = "";
    } catch (error) {
      this.outcome = {
        good: false,
        text: error instanceof Refused ? error.message : String(error),
      };
    }
    this.running = false;
    this.dispatchEvent(new CustomEvent("done", { bubbles: true }));
  }

  render() {
    const act = this.act;
    if (!act) return nothing;
    const id = `act-${act.name.replace(/\W/g, "-")}`;
    const confirmed =
      !act.confirm || (this.value(act.confirm) !== "" && this.typed === this.value(act.confirm));
    const filled = act.fields.every((field) => this.value(field) !== "" || OPTIONAL.includes(field));
    const danger = Boolean(act.confirm) || act.name.startsWith("stop");
    return html`<form
      class="act"
      @submit=${(/** @type {Event} */ event) => this.submit(event)}
      aria-labelledby="${id}-words"
    >
      <h3 id="${id}-words">${act.words}</h3>
      <div class="row">
        ${act.fields.map((field) => this.field(act, field))}
        ${
          act.confirm && act.allowed
            ? html`<label
                >type ${this.value(act.confirm) || `the ${act.confirm}`} to confirm
                <input
                  autocomplete="off"
                  spellcheck="false"
                  .value=${live(this.typed)}
                  @input=${(/** @type {any} */ event) => {
                    this.typed = event.target.value;
                  }}
              /></label>`
            : nothing
        }
        <button
          class=${danger ? "danger" : "primary"}
          ?disabled=${!act.allowed || !confirmed || !filled || this.running}
          aria-describedby=${act.allowed ? "" : `${id}-why`}
        >
          ${verb(act.name)}
        </button>
      </div>
      ${act.allowed ? nothing : html`<p class="why-not" id="${id}-why">Not now: ${act.why_not}</p>`}
      <p class="cli" ?hidden=${!act.command}>
        <span>same as</span> <code>${this.command()}</code>
        <button
          type="button"
          class="quiet"
          @click=${() => navigator.clipboard?.writeText(this.command())}
          aria-label="Copy the command of ${verb(act.name)}"
        >
          copy
        </button>
      </p>
      <p class="outcome ${this.outcome?.good ? "ok" : "bad"}" role="status">
        ${this.outcome ? `${this.outcome.good ? "✓" : "✕"} ${this.outcome.text}` : ""}
      </p>
    </form>`;
  }

  /** @param {Act} act  @param {string} field */
  field(act, field) {
    const choices = act.choices[field];
    const set = (/** @type {any} */ event) => {
      this.values = { ...this.values, [field]: event.target.value };
    };
    const optional = OPTIONAL.includes(field);
    if (choices && choices.length <= MOST) {
      return html`<label
        >${field}<select ?disabled=${!act.allowed} @change=${set}>
          ${choices.length && !optional ? nothing : html`<option value="" ?selected=${!this.value(field)}>none</option>`}
          ${choices.map((each) => html`<option value=${each} ?selected=${each === this.value(field)}>${each}</option>`)}
        </select></label
      >`;
    }
    return html`<label
      >${field}<input
        autocomplete="off"
        spellcheck="false"
        placeholder=${field === "value" ? "empty: as in the file" : (FIRST[`${act.name} ${field}`] ?? (optional ? "may be empty" : ""))}
        inputmode=${NUMBERS.includes(field) ? "decimal" : "text"}
        ?disabled=${!act.allowed}
        .value=${live(this.value(field))}
        @input=${set}
    /></label>`;
  }
}

/** "chaos-kill" as "Kill". @param {string} name */
function verb(name) {
  if (name === "config") return "Set";
  const word =
    name
      .split(/[-/]/)
      .slice(name.startsWith("chaos") ? 1 : 0)
      .join(" ") || name;
  return capital(word);
}

/** What a field's text is in JSON. @param {string} field  @param {string} text */
function typed(field, text) {
  if (NUMBERS.includes(field)) return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text);
  if (field === "value") {
    try {
      const value = JSON.parse(text);
      return typeof value === "object" ? text : value;
    } catch {
      return text;
    }
  }
  return text;
}

/** As a shell needs it. @param {string} text */
const quoted = (text) => (/^[\w./:@=+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

customElements.define("ed-act", ActForm);
customElements.define("ed-acts", ActPage);
