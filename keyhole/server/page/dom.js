// Elements from plain calls. Text always becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("button", { class: "small", onclick: f }, "Stop"). `false` and null are left out. */
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

/** A picture of the sprite in index.html; it says nothing to a screen reader. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with a picture and a name; the name is shown if `shown`. */
export function button(name, picture, onclick, { shown = false, ...more } = {}) {
  const text = shown ? h("span", {}, name) : null;
  const label = shown ? {} : { "aria-label": name, title: name };
  return h("button", { type: "button", onclick, ...label, ...more }, picture && icon(picture), text);
}

export const $ = (selector) => document.querySelector(selector);

/** Says something to a screen reader, and nothing to the eye. */
export function announce(text) {
  $("#status").textContent = text;
}

/** Shows a short message for some seconds. */
export function toast(text, kind = "info") {
  const shown = h("div", { class: `toast ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
  $("#toasts").append(shown);
  setTimeout(() => shown.remove(), kind === "error" ? 9000 : 3500);
}

export async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyOld(text);
    toast("Copied");
  } catch {
    toast("The browser does not allow copying here", "error");
  }
}

/** Over plain HTTP from another machine there is no clipboard but this one. */
function copyOld(text) {
  const field = h("textarea", { value: text, class: "hidden" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}

const number = new Intl.NumberFormat("en");
export const count = (value) => number.format(value);
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 2 : 1)} %`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) [value, step] = [value / 1024, step + 1];
  return `${step ? value.toFixed(1) : value} ${units[step]}`;
}
