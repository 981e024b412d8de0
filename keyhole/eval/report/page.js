// A click on a head sorts its table by that column, a second one turns the order; what is missing
// stays last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const column = head.cellIndex;
    const key = (row) => row.cells[column].dataset.sort;
    const isText = head.classList.contains("name");
    const before = head.getAttribute("aria-sort");
    const up = before ? before === "descending" : isText;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const compare = (a, b) => (isText ? a.localeCompare(b) : a - b);
    const rows = [...body.rows].sort((one, other) => {
      const a = key(one), b = key(other);
      if (a === "" || b === "") return (a === "") - (b === "");
      return up ? compare(a, b) : compare(b, a);
    });
    body.append(...rows);
  });
}
