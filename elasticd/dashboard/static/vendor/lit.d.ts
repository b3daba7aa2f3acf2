export { LitElement, PropertyDeclarations, html, svg, nothing, noChange, render } from "lit";
export { repeat } from "lit/directives/repeat.js";
export { guard } from "lit/directives/guard.js";
export { keyed } from "lit/directives/keyed.js";
export { live } from "lit/directives/live.js";
