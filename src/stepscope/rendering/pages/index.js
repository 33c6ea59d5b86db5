// The index of runs: all runs are data, and a page of the rows that are wanted is built at a time.
(() => {
  const $ = (id) => document.getElementById(id), data = JSON.parse($("data").textContent), at = data.figures, total = at.id.length;
  const element = (name, attributes = {}, ...inside) => {
    const node = document.createElementNS(["svg", "path", "circle", "title"].includes(name) ? "http://www.w3.org/2000/svg" : document.documentElement.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
    node.append(...inside);
    return node;
  };
  const ROWS = 50, figure = (value) => value === null ? "" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  const share = (value) => `${value > 0 ? "+" : ""}${value.toFixed(1)} %`;
  const trend = (i) => at.trend[i] === null ? null : data.since[at.trend[i]];
  const some = (column) => column.some((value) => value !== null && value !== "");
  const differ = new Set(data.devices).size > 1, tokens = some(at.tokens);
  const columns = [
    { head: "measured", of: (i) => at.instant[i], text: (i) => at.created[i], class: "when" },
    { head: "workload", of: (i) => data.names[at.cell[i]], class: "name" },
    differ && { head: "device", of: (i) => data.devices[at.cell[i]] },
    { head: "step ms", of: (i) => at.step[i], number: true, text: (i) => at.step[i] === null ? at.status[i] : figure(at.step[i]) },
    tokens && { head: "tokens/s", of: (i) => at.tokens[i], number: true },
    !tokens && some(at.samples) && { head: "samples/s", of: (i) => at.samples[i], number: true },
    some(at.mfu) && { head: "MFU %", of: (i) => at.mfu[i], number: true },
    some(at.peak) && { head: "peak GiB", of: (i) => at.peak[i], number: true },
    some(at.doubts) && { head: "to doubt", of: (i) => at.doubts[i], class: "doubt" },
    some(at.tag) && { head: "tag", of: (i) => at.tag[i] },
    { head: "history", of: trend, number: true, draw: (i) => history(i) },
  ].filter(Boolean);

  // A history: the typical steps of a workload on its device, a dot where this run stands, a ring where the level changed.
  function history(i) {
    const steps = at.trend[i] === null ? [] : data.histories[at.trend[i]], since = trend(i);
    if (steps.length < 2) return [];
    const low = Math.min(...steps), high = Math.max(...steps), flat = high - low < 0.02 * high;
    const middle = (high + low) / 2, span = flat ? 0.02 * high : high - low, every = Math.ceil(steps.length / 120);
    const x = (place) => (3 + 90 * place / (steps.length - 1)).toFixed(1), y = (value) => (11 - 16 * (value - middle) / span).toFixed(1);
    const kept = steps.map((value, place) => [place, value]).filter(([place]) => place % every === 0 || place === steps.length - 1);
    const label = `${steps.length} points from ${figure(low)} to ${figure(high)} ms, the newest ${figure(steps.at(-1))}${since === null ? ", one level" : `, level ${share(since)}`}`;
    const marks = data.changes[at.trend[i]].map((place) => element("circle", { class: "turn", cx: x(place), cy: y(steps[place]), r: 3 }));
    const own = at.place[i] === null ? [] : [element("circle", { class: "own", cx: x(at.place[i]), cy: y(steps[at.place[i]]), r: 2.5 })];
    return [element("span", { class: "since" }, since === null ? "" : share(since)), element("svg", { class: "spark", viewBox: "0 0 96 22", role: "img", "aria-label": label },
      element("title", {}, label), element("path", { d: kept.map(([place, value], n) => `${n ? "L" : "M"}${x(place)} ${y(value)}`).join("") }), ...marks, ...own)];
  }

  const texts = at.id.map((id, i) => [id, data.names[at.cell[i]], data.devices[at.cell[i]], at.created[i], at.status[i], at.tag[i], at.doubts[i]].join(" ").toLocaleLowerCase());
  const table = $("all"), heads = element("tr", {}, element("th", { scope: "col" }, element("span", { class: "unseen" }, "compare"))), body = table.tBodies[0];
  let sorted = 0, down = true, from = 0, rows = [], picked = [];
  columns.forEach((column, n) => {
    const button = element("button", { type: "button" }, column.head);
    button.addEventListener("click", () => { down = sorted === n ? !down : Boolean(column.number) || n === 0; sorted = n; choose(); });
    heads.append(element("th", { scope: "col", class: column.number ? "number" : null }, button));
  });
  table.tHead.replaceChildren(heads);

  function choose() {
    const words = $("words").value.toLocaleLowerCase().split(/\s+/).filter(Boolean), device = $("device") ? $("device").value : "", seen = new Set();
    rows = [];
    for (let i = 0; i < total; i++) { // newest first
      if (device && data.devices[at.cell[i]] !== device) continue;
      if (!words.every((word) => texts[i].includes(word))) continue;
      if ($("newest").checked) { const key = at.trend[i] === null ? `cell ${at.cell[i]}` : at.trend[i]; if (seen.has(key)) continue; seen.add(key); }
      rows.push(i);
    }
    const { of } = columns[sorted], empty = (value) => value === null || value === "";
    rows.sort((one, other) => {
      const a = of(one), b = of(other);
      if (empty(a) || empty(b)) return empty(a) - empty(b) || one - other;
      const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      return (down ? -order : order) || one - other;
    });
    [...heads.cells].slice(1).forEach((head, n) => { if (n === sorted) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    from = 0;
    show();
  }

  function show() {
    body.replaceChildren(...rows.slice(from, from + ROWS).map((i) => {
      const box = element("input", { type: "checkbox", "aria-label": `Pick ${data.names[at.cell[i]]} of ${at.created[i]}` });
      box.checked = picked.includes(i);
      box.addEventListener("change", () => { picked = box.checked ? [...picked, i] : picked.filter((one) => one !== i); tray(); });
      return element("tr", { title: at.id[i] }, element("td", {}, box), ...columns.map((column) => {
        const inside = column.draw ? column.draw(i) : [column.text ? column.text(i) : column.number ? figure(column.of(i)) : column.of(i)];
        return element("td", { class: [column.number && "number", column.class].filter(Boolean).join(" ") || null }, ...inside);
      }));
    }));
    const to = Math.min(from + ROWS, rows.length), all = rows.length === total ? "" : `, of ${total.toLocaleString("en")} in all`;
    $("count").textContent = rows.length ? `${(from + 1).toLocaleString("en")} to ${to.toLocaleString("en")} of ${rows.length.toLocaleString("en")} ${rows.length === 1 ? "run" : "runs"}${all}` : `No run matches${all}`;
    $("back").disabled = from === 0;
    $("on").disabled = to >= rows.length;
  }

  // What is picked is compared below the table: the first is the base.
  const overlap = (a, b) => [a, b].some((i) => at.low[i] === null) ? null : at.low[a] <= at.high[b] && at.low[b] <= at.high[a];
  const beside = (value, base) => value === null || !base ? "" : `${(value / base).toPrecision(3)} x`;
  function compared() {
    const [base, ...others] = picked, fields = Object.keys(data.fields).filter((name) => new Set(picked.map((i) => data.fields[name][at.cell[i]])).size > 1);
    const lines = [["measured", (i) => at.created[i]], ...fields.map((name) => [name, (i) => String(data.fields[name][at.cell[i]] ?? "")]),
      ["step ms", (i) => figure(at.step[i])], ["95 % interval", (i) => at.low[i] === null ? "none" : `${figure(at.low[i])} to ${figure(at.high[i])}`],
      ["step / base", (i) => i === base ? "" : beside(at.step[i], at.step[base])], tokens && ["tokens/s", (i) => figure(at.tokens[i])],
      ["peak GiB", (i) => figure(at.peak[i])], ["peak / base", (i) => i === base ? "" : beside(at.peak[i], at.peak[base])], ["to doubt", (i) => at.doubts[i]]].filter(Boolean);
    const head = element("tr", {}, element("th", { scope: "col" }, "run"), ...picked.map((i) => element("th", { scope: "col", class: "number" }, data.names[at.cell[i]], i === base ? " (base)" : "")));
    const inside = lines.filter(([, of]) => picked.some((i) => of(i) !== "")).map(([name, of]) => element("tr", {}, element("th", { scope: "row" }, name), ...picked.map((i) => element("td", { class: "number" }, of(i)))));
    const met = others.map((i) => overlap(base, i)), unsure = met.filter((one) => one !== false).length;
    const word = others.length === 1 ? (unsure ? "The intervals of the steps meet, or one has none: these two runs do not tell them apart." : "The intervals of the steps do not meet.")
      : `The interval of the step meets the base's, or there is none, in ${unsure} of ${others.length}.`;
    // Fields that no workload has, but its run, are none that compare pairs by.
    const across = [...new Set(fields.filter((name) => !["warmup", "torch", "commit", "ranks"].includes(name)).map((name) => name === "memory_limit" ? "device" : name))];
    const options = `${across.length ? ` --across ${across.join(",")}` : ""}${data.place === "runs" ? "" : ` --runs ${data.place}`}`;
    const sides = others.length === 1 && data.place ? [element("pre", { tabindex: "0" }, element("code", {}, `stepscope compare ${at.id[base]} ${at.id[others[0]]}${options}`))] : [];
    $("comparison").replaceChildren(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Picked runs, compared" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...inside))),
      element("p", {}, `${word} Each interval is of one process, and another may differ by more: stepscope compare judges.`), ...sides);
  }
  function tray() {
    $("tray").hidden = picked.length === 0;
    $("picked").textContent = `${picked.length} picked`;
    $("compare").disabled = picked.length < 2;
    const open = picked.length > 1 && $("compare").getAttribute("aria-expanded") === "true";
    if (!open) $("compare").setAttribute("aria-expanded", "false");
    $("comparison").hidden = !open;
    if (open) compared();
  }
  $("compare").addEventListener("click", () => { $("compare").setAttribute("aria-expanded", String($("comparison").hidden)); tray(); });
  $("clear").addEventListener("click", () => { picked = []; tray(); show(); $("words").focus(); });
  $("back").addEventListener("click", () => { from -= ROWS; show(); });
  $("on").addEventListener("click", () => { from += ROWS; show(); });
  $("choose").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["words", "device", "newest"]) if ($(id)) $(id).addEventListener("input", choose);
  for (const id of ["choose", "pages"]) $(id).hidden = false;
  if ($("without")) $("without").remove();
  choose();
})();
