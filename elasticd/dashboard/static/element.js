// @ts-check
/** The bases of all elements: in the light DOM, which labels and find-in-page reach; and those that know their
 * width. */

import { LitElement } from "./vendor/lit.js";
/** @import { PropertyDeclarations } from "./vendor/lit.js" */

export class Part extends LitElement {
  createRenderRoot() {
    return this;
  }
}

/** An element that draws by its own width, in CSS pixels. */
export class Measured extends Part {
  static properties = /** @type {PropertyDeclarations} */ ({
    width: { state: true },
  });

  constructor() {
    super();
    this.width = 0;
    /** @type {ResizeObserver | null} */ this.sizes = null;
  }

  connectedCallback() {
    super.connectedCallback();
    this.sizes = new ResizeObserver(() => {
      const width = Math.floor(this.clientWidth);
      if (width && width !== this.width) this.width = width;
    });
    this.sizes.observe(this);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.sizes?.disconnect();
  }
}
