// @ts-check
/** Who is at the browser: a token is exchanged for a random word in a cookie that scripts cannot read. */

import { html, nothing } from "../vendor/lit.js";
import { Part } from "../element.js";
import { Refused, asked } from "../source.js";
/** @import { Viewer } from "../../tools/api.d.ts" */

/** Milliseconds between two looks at whether signing in is needed still. */
const LOOK = 3000;

class LoginPage extends Part {
  static properties = { error: { state: true }, running: { state: true } };

  constructor() {
    super();
    this.error = "";
    this.running = false;
    this.timer = 0;
  }

  connectedCallback() {
    super.connectedCallback();
    // Before a leader was heard everybody has to sign in; it may say then that nobody has to.
    this.timer = window.setInterval(() => this.look(), LOOK);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    window.clearInterval(this.timer);
  }

  async look() {
    try {
      const viewer = /** @type {Viewer} */ (await asked("GET", "/api/viewer"));
      if (viewer.signed_in && this.isConnected && !this.running)
        this.dispatchEvent(new CustomEvent("signed-in", { detail: viewer, bubbles: true }));
    } catch {
      // The banner says that the dashboard does not answer.
    }
  }

  /** @param {SubmitEvent} event */
  async submit(event) {
    event.preventDefault();
    const field = /** @type {HTMLInputElement} */ (this.querySelector("input[name=token]"));
    this.running = true;
    this.error = "";
    try {
      const viewer = await asked("POST", "/session", {
        token: field.value.trim(),
      });
      field.value = "";
      this.dispatchEvent(new CustomEvent("signed-in", { detail: viewer, bubbles: true }));
    } catch (error) {
      this.error = error instanceof Refused ? error.message : String(error);
      field.focus();
    }
    this.running = false;
  }

  render() {
    return html`<section class="panel login" aria-labelledby="login-title">
      <form @submit=${(/** @type {SubmitEvent} */ event) => this.submit(event)}>
        <h1 id="login-title" tabindex="-1">Sign in</h1>
        <p>This cluster asks who you are. Paste a token of a viewer or an operator.</p>
        <input type="text" name="username" autocomplete="username" value="token" hidden />
        <label
          >Token<input
            type="password"
            name="token"
            autocomplete="current-password"
            required
            aria-invalid=${this.error ? "true" : "false"}
            aria-describedby="login-error"
        /></label>
        <p id="login-error" class="outcome bad" role="alert">${this.error ? `✕ ${this.error}` : nothing}</p>
        <div>
          <button class="primary" ?disabled=${this.running}>Sign in</button>
        </div>
        <p class="small muted">
          The token stays in the memory of the dashboard's server. Your browser gets a random word for it, in a
          cookie that scripts cannot read.
        </p>
      </form>
    </section>`;
  }
}

customElements.define("ed-login", LoginPage);
