// Sorts the tasks' table: a click on a heading orders by it, another click turns the order round.
document.querySelectorAll("table.sortable").forEach((table) => {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const sort = () => {
      const upward = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", upward ? "ascending" : "descending");
      const key = (body) => body.rows[0].cells[column].dataset.order ?? body.rows[0].cells[column].textContent;
      const compare = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: false });
      const numeric = (a, b) => Number(key(a)) - Number(key(b));
      const bodies = [...table.tBodies];
      const order = bodies.every((body) => key(body) !== "" && !Number.isNaN(Number(key(body)))) ? numeric : compare;
      bodies.sort((a, b) => (upward ? order(a, b) : order(b, a))).forEach((body) => table.append(body));
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
});
