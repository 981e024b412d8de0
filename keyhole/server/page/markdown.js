// The text of an answer as elements. A model's output is not trusted: Markdown becomes markup only
// through DOMPurify, with a short list of tags, and never loads anything.

import { marked } from "./vendor/marked.js";
import "./vendor/purify.js";
import { copy, button, h } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

// Markup in an answer is shown as the text that it is.
marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(`![${text}](${href})`),
  },
});

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (letter) => ESCAPES[letter]);

const purify = globalThis.DOMPurify;

/** A fragment to be put into the page. */
export function rendered(text) {
  const made = purify.sanitize(marked.parse(text), ALLOWED);
  for (const link of made.querySelectorAll("a")) {
    if (link.hasAttribute("href")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    } else link.replaceWith(...link.childNodes);
  }
  for (const block of made.querySelectorAll("pre")) block.replaceWith(code(block));
  for (const table of made.querySelectorAll("table")) {
    const scroller = h("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  // Headings of an answer stand below those of the page.
  for (const heading of made.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const level = Math.min(6, Number(heading.tagName[1]) + 2);
    heading.replaceWith(h(`h${level}`, { class: "in-answer" }, ...heading.childNodes));
  }
  for (const other of made.querySelectorAll("[class]")) {
    if (!other.closest(".code, .scroller") && !other.matches(".in-answer")) other.removeAttribute("class");
  }
  return made;
}

function code(block) {
  const text = block.textContent;
  const found = /language-([\w+#-]{1,20})/.exec(block.querySelector("code")?.className ?? "");
  const language = found?.[1] ?? "code";
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language), button("Copy code", "copy", () => copy(text))),
    h("pre", { tabindex: 0, role: "group", "aria-label": `Code: ${language}` }, h("code", {}, text)),
  );
}
