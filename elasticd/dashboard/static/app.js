// @ts-check
/** The frame around all pages: who leads, what is away, where one can go; and which page an address means. */

import { html, keyed, nothing } from "./vendor/lit.js";
import "./bars.js";
import "./chart.js";
import { Part } from "./element.js";
import { age, capital, clock, moment } from "./format.js";
import { patterns } from "./heat.js";
import { news } from "./news.js";
import { chip } from "./page.js";
import "./pages/act.js";
import { over } from "./pages/cluster.js";
import "./pages/device.js";
import "./pages/events.js";
import "./pages/job.js";
import "./pages/jobs.js";
import "./pages/login.js";
import "./pages/plan.js";
import "./pages/switch.js";
import "./schedule.js";
import { asked, get, here, recording, session, to } from "./source.js";
/** @import { Viewer } from "../tools/api.d.ts" */

/** Milliseconds until a page that is hidden gives its stream back. */
const HIDDEN = 60_000;
/** Jobs that run and have a place in the bar; the others are behind "Jobs". */
const JOBS = 5;

/** @type {[RegExp, (match: RegExpMatchArray, query: string) => {title: string, page: unknown}][]} */
const ROUTES = [
  [/^\/$/, () => ({ title: "Cluster", page: html`<ed-cluster></ed-cluster>` })],
  [/^\/jobs$/, () => ({ title: "Jobs", page: html`<ed-jobs></ed-jobs>` })],
  [
    /^\/jobs\/([^/]+)\/?$/,
    ([, job]) => ({
      title: `Job ${job}`,
      page: html`<ed-job job=${job}></ed-job>`,
    }),
  ],
  [
    /^\/jobs\/([^/]+)\/plans\/(\d+)$/,
    ([, job, plan]) => ({
      title: `Plan ${plan} of ${job}`,
      page: html`<ed-plan job=${job} number=${plan}></ed-plan>`,
    }),
  ],
  [
    /^\/jobs\/([^/]+)\/switch$/,
    ([, job], query) => ({
      title: `Switch of ${job}`,
      page: html`<ed-switch job=${job} number=${new URLSearchParams(query).get("number") ?? 0}></ed-switch>`,
    }),
  ],
  [
    /^\/devices\/([^/]+)\/([^/]+)$/,
    ([, node, rank]) => ({
      title: `${node}/${rank}`,
      page: html`<ed-device node=${node} rank=${rank}></ed-device>`,
    }),
  ],
  [
    /^\/events$/,
    (_, query) => ({
      title: "Events",
      page: html`<ed-events search=${query}></ed-events>`,
    }),
  ],
  [/^\/act$/, () => ({ title: "Act", page: html`<ed-acts></ed-acts>` })],
];

/** @param {string} address */
function routed(address) {
  const [path, query = ""] = address.split("?");
  for (const [shape, made] of ROUTES) {
    const match = path.match(shape);
    if (match) return made(/** @type {any} */ (match.map(decoded)), query);
  }
  return {
    title: "Not there",
    page: html`<h1 tabindex="-1">There is no such page</h1>
      <p><a href=${to("/")}>The cluster</a></p>`,
  };
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

class App extends Part {
  static properties = {
    address: { state: true },
    viewer: { state: true },
    visit: { state: true },
    beat: { state: true },
  };

  constructor() {
    super();
    this.address = here();
    /** @type {Viewer | null} */ this.viewer = null;
    this.beat = 0;
    /** Counts the arrivals at pages: each begins anew. */ this.visit = 0;
    this.resting = 0;
    this.began = "";
  }

  connectedCallback() {
    super.connectedCallback();
    addEventListener(recording ? "hashchange" : "popstate", () => this.went());
    document.addEventListener("click", (event) => this.clicked(event));
    this.addEventListener("go", (event) => this.go(/** @type {CustomEvent} */ (event).detail));
    news.addEventListener("change", () => this.requestUpdate());
    document.addEventListener("visibilitychange", () => this.shown());
    news.addEventListener("signed-out", () => this.who());
    session.addEventListener("over", () => {
      if (this.viewer?.signed_in) this.who();
    });
    setInterval(() => {
      if (news.silence() !== null || news.connection === "lost" || news.cluster?.leader.reachable === false)
        this.beat += 1;
    }, 1000);
    this.who();
  }

  /** Who is at the browser, and whether pages may be shown. */
  async who() {
    try {
      this.viewer = await get("/api/viewer");
    } catch {
      if (recording) this.viewer = { signed_in: true, asks: false, name: "", role: "" };
      else setTimeout(() => this.who(), 1000);
    }
    this.entered();
  }

  /** A browser keeps few connections to a server: pages that nobody looks at give theirs back after a while. */
  shown() {
    clearTimeout(this.resting);
    if (document.hidden) this.resting = setTimeout(() => news.stop(), HIDDEN);
    else if (this.viewer?.signed_in && !recording && !news.stream) news.open();
  }

  entered() {
    if (this.viewer?.signed_in) news.start();
    else news.stop();
  }

  async leave() {
    this.viewer = /** @type {Viewer} */ (await asked("DELETE", "/session"));
    news.cluster = null;
    this.entered();
  }

  went() {
    this.address = here();
    this.visit += 1;
    this.updateComplete.then(() => this.arrived());
  }

  /** The new page's head is read out, and is where the keyboard goes on. */
  arrived() {
    const title = /** @type {HTMLElement | null} */ (this.querySelector("main h1"));
    title?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }

  /** @param {string} href */
  go(href) {
    if (recording) location.hash = href.slice(1);
    else {
      history.pushState(null, "", href);
      this.went();
    }
  }

  /** Links between pages load nothing. @param {MouseEvent} event */
  clicked(event) {
    if (
      recording ||
      event.defaultPrevented ||
      event.button !== 0 ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const link = event.target instanceof Element ? event.target.closest("a[href]") : null;
    const href = link?.getAttribute("href") ?? "";
    if (!link || !href.startsWith("/") || href.startsWith("/static/") || link.hasAttribute("download")) return;
    event.preventDefault();
    this.go(href);
  }

  render() {
    const known = news.cluster;
    const signed = this.viewer?.signed_in ?? false;
    const { title, page } = routed(this.address);
    const name = this.viewer && !signed ? "Sign in" : title;
    document.title = `${name} · ${known?.cluster ?? "elasticd"}`;
    return html`<a
        class="skip"
        href="#main"
        @click=${(/** @type {Event} */ event) => {
          event.preventDefault();
          this.arrived();
        }}
        >To the content</a
      >
      ${patterns}
      <header class="topbar">
        <a class="brand" href=${to("/")}>elasticd <span>${known?.cluster ?? ""}</span></a>
        ${
          signed
            ? html`<nav aria-label="Pages">
                <ul>
                  ${this.links()}
                </ul>
              </nav>`
            : nothing
        }
        <span class="grow"></span>
        ${signed ? this.state() : nothing}
      </header>
      <div role="status">${signed ? this.banners() : nothing}</div>
      <main id="main">
        ${
          this.viewer === null
            ? html`<h1 class="hidden-text" tabindex="-1">elasticd</h1>
                <p class="muted">Waiting for the dashboard's server …</p>`
            : signed
              ? html`${keyed(`${this.visit} ${this.address}`, page)}`
              : html`<ed-login
                  @signed-in=${(/** @type {CustomEvent} */ event) => {
                    this.viewer = event.detail;
                    this.entered();
                  }}
                ></ed-login>`
        }
      </main>`;
  }

  links() {
    const jobs = (news.cluster?.jobs ?? []).filter((job) => recording || !over(job)).slice(0, JOBS);
    const [path] = this.address.split("?");
    /** @param {string} href  @param {unknown} words  @param {boolean} current */
    const link = (href, words, current) =>
      html`<li>
        <a href=${to(href)} aria-current=${current ? "page" : nothing}>${words}</a>
      </li>`;
    const act = recording ? nothing : link("/act", "Act", path === "/act");
    const shown = jobs.map((job) => `/jobs/${encodeURIComponent(job.job)}`);
    const isOf = (/** @type {string} */ href) => path === href || path.startsWith(`${href}/`);
    return html`${link("/", "Cluster", path === "/" || path.startsWith("/devices/"))}
    ${jobs.map((job, index) => link(shown[index], job.job, isOf(shown[index])))}
    ${link("/jobs", "Jobs", isOf("/jobs") && !shown.some(isOf))}
    ${link("/events", "Events", path === "/events")}${act}`;
  }

  state() {
    const known = news.cluster;
    if (recording) return html`<div class="state">report of ${moment(known?.now)}</div>`;
    const silent = news.silence() !== null || news.connection === "lost";
    return html`<div class="state">
      ${known ? html`<span>leader ${known.leader.name || "none"} epoch ${known.leader.epoch}</span>` : nothing}
      ${
        news.connection === "opening"
          ? chip("", "…", "connecting")
          : silent
            ? chip("bad", "✕", "no news")
            : known?.leader.reachable === false
              ? chip("warn", "!", "no leader")
              : chip("ok", "●", "live")
      }
      ${
        this.viewer?.asks
          ? html`<span>${this.viewer.name || "signed in"}, ${this.viewer.role}</span>
              <button class="quiet" @click=${() => this.leave()}>Sign out</button>`
          : nothing
      }
    </div>`;
  }

  banners() {
    const known = news.cluster;
    if (recording) return nothing;
    const found = [];
    const silence = news.silence();
    if (news.connection === "lost" || silence !== null) {
      const since = silence ?? (performance.now() - news.heardAt) / 1e3;
      found.push(
        banner(
          "bad",
          "✕",
          html`The dashboard's server does not
          answer${news.heardAt ? html`: last heard ${age(since)} ago` : nothing}. What is shown is from then;
          the page goes on by itself.`,
        ),
      );
    } else if (known && !known.leader.reachable) {
      found.push(
        banner(
          "warn",
          "!",
          html`No coordinator leads${known.heard ? html`: last heard ${age(news.age())} ago` : nothing}.
          Training goes on; nothing is decided until one does. ${capital(known.leader.trouble)}`,
        ),
      );
    }
    if (known && !known.etcd.reachable) {
      found.push(
        banner(
          "warn",
          "!",
          html`etcd does not answer since ${clock(known.etcd.since)}. Training goes on; decisions wait.`,
        ),
      );
    }
    if (known?.leader.reachable && known.etcd.unwritten_seconds > 0) {
      found.push(
        banner(
          "warn",
          "!",
          html`For ${age(known.etcd.unwritten_seconds)}, etcd has not taken what was decided: a new leader would
          not know of all that is shown here.`,
        ),
      );
    }
    if (known?.paused)
      found.push(
        banner(
          "info",
          "‖",
          html`Replanning is paused. <a href=${to("/act")}>Resume it</a>, or <code>elasticd resume</code>`,
        ),
      );
    return found;
  }
}

/** @param {string} tone  @param {string} glyph  @param {unknown} words */
const banner = (tone, glyph, words) =>
  html`<div class="banner ${tone}"><span aria-hidden="true">${glyph}</span><span>${words}</span></div>`;

customElements.define("ed-app", App);
