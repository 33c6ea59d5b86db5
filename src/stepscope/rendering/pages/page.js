"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Light or dark: as the system has it, until somebody chooses.
  const root = document.documentElement, theme = document.getElementById("theme");
  const stored = { get: () => { try { return localStorage.getItem("stepscope-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("stepscope-theme", value); } catch { /* a page from disk may not */ } } };
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  if (["light", "dark"].includes(stored.get())) root.dataset.theme = stored.get();
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; stored.set(root.dataset.theme); name(); });

  // Sections fold. What lies beyond three screens is folded at first; a link opens what it leads to, print opens all.
  const folds = all("details"), parts = all("details.fold"), fold = document.getElementById("fold");
  for (const part of parts) if (parts.length > 1 && part.open && part.getBoundingClientRect().bottom + scrollY > 3 * innerHeight) part.open = false;
  const opened = () => { const at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const part = at && (at.querySelector("details.fold") || at.closest("details")); if (part) part.open = true; if (at) at.scrollIntoView(); };
  addEventListener("hashchange", opened);
  if (location.hash) opened();
  const links = all("nav a"), places = links.map((link) => document.getElementById(link.hash.slice(1)));
  links.forEach((link) => link.addEventListener("click", () => { if (link.hash === location.hash) opened(); }));
  if (fold) {
    const closed = () => parts.some((part) => !part.open), told = () => { fold.textContent = closed() ? "Unfold all" : "Fold all"; };
    fold.hidden = false;
    fold.addEventListener("click", () => { const open = closed(); folds.forEach((one) => { one.open = open; }); told(); });
    parts.forEach((part) => part.addEventListener("toggle", told));
    told();
  }
  let before = [];
  addEventListener("beforeprint", () => { before = folds.filter((one) => !one.open); before.forEach((one) => { one.open = true; }); });
  addEventListener("afterprint", () => { before.forEach((one) => { one.open = false; }); });
  let current = null;
  const follow = () => {
    const line = innerHeight / 3, above = places.map((place, i) => [place, links[i]]).filter(([place]) => place && (place.tagName === "MAIN" || place.getBoundingClientRect().top < line));
    const bottom = scrollY + innerHeight >= document.documentElement.scrollHeight - 2 && scrollY > 0;
    const link = bottom ? links.at(-1) : (above.at(-1) || [])[1];
    if (!link || link === current) return;
    if (current) current.removeAttribute("aria-current");
    current = link;
    link.setAttribute("aria-current", "location");
    const bar = link.closest("nav"), left = link.offsetLeft - bar.offsetLeft;
    if (left < bar.scrollLeft + 20 || left + link.offsetWidth > bar.scrollLeft + bar.clientWidth - 30) bar.scrollTo({ left: left - 40 });
  };
  let waiting = false;
  addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; follow(); }); } }, { passive: true });
  follow();

  // Tables: a click on a head sorts, the field filters, the button copies what is shown.
  for (const box of all(".table")) {
    const table = box.querySelector("table"), body = table.tBodies[0], rows = [...body.rows];
    const cell = (row, i) => { const found = row.cells[i], value = found.dataset.value;
      return value === undefined ? found.textContent.trim() : Number.isNaN(Number(value)) ? value : Number(value); };
    all("th", table.tHead).forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.classList.contains("number") ? head.getAttribute("aria-sort") !== "descending" : head.getAttribute("aria-sort") === "ascending";
        all("th", table.tHead).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = rows.map((row) => [cell(row, i), row]);
        keyed.sort(([a, one], [b, other]) => {
          const last = one.classList.contains("last"), alsoLast = other.classList.contains("last");
          if (last || alsoLast) return last && alsoLast ? rows.indexOf(one) - rows.indexOf(other) : last - alsoLast;
          if (a === "" || b === "") return (a === "") - (b === "");
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
          return down ? -order : order;
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
    const field = box.querySelector("input");
    if (field) {
      field.hidden = false;
      field.addEventListener("input", () => { const wanted = field.value.toLocaleLowerCase();
        for (const row of rows) row.hidden = !row.textContent.toLocaleLowerCase().includes(wanted); });
    }
    const copy = box.querySelector(".copy");
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      const lines = [...table.rows].filter((row) => !row.hidden).map((row) => [...row.cells].map((one) => one.textContent.trim()).join("\t"));
      const text = lines.join("\n") + "\n";
      let done = true;
      try { await navigator.clipboard.writeText(text); } catch {
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        done = document.execCommand("copy");
        area.remove();
      }
      copy.textContent = done ? "Copied" : "Cannot copy";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  }

  // Icicle: a click opens a part to the whole width, another on it closes it.
  for (const figure of all(".icicle")) {
    const tiles = all(".tiles button", figure).map((node) => ({ node, left: +node.dataset.l, width: +node.dataset.w, depth: +node.dataset.d }));
    const way = figure.querySelector(".way");
    let open = tiles[0];
    const above = (one, depth) => tiles.find((other) => other.depth === depth && other.left <= one.left + 1e-9 && one.left < other.left + other.width - 1e-9);
    const show = (one) => {
      open = one;
      for (const { node, left, width, depth } of tiles) {
        const begin = (left - open.left) / open.width, share = width / open.width;
        const around = depth < open.depth && left <= open.left + 1e-9 && open.left + open.width <= left + width + 1e-9;
        const inside = begin > -1e-9 && begin + share < 1 + 1e-6;
        node.hidden = !(around || inside);
        node.style.left = `${around ? 0 : begin * 100}%`;
        node.style.width = `${around ? 100 : share * 100}%`;
        node.tabIndex = !node.hidden && (around || share >= 0.02) ? 0 : -1;
      }
      const parts = [];
      for (let depth = 0; depth <= one.depth; depth++) { const part = depth === one.depth ? one : above(one, depth); if (part) parts.push(part.node.getAttribute("aria-label")); }
      way.textContent = one === tiles[0] ? "Choose a part to open it." : parts.join(" › ");
    };
    for (const one of tiles) one.node.addEventListener("click", () => show(one === open && one.depth ? above(one, one.depth - 1) || tiles[0] : one));
    figure.addEventListener("keydown", (event) => { if (event.key === "Escape") show(tiles[0]); });
    show(tiles[0]);
  }

  // Timeline: all lanes share one window of time.
  for (const figure of all(".timeline")) {
    const begin = +figure.dataset.begin, end = +figure.dataset.end, ends = all(".ends span", figure);
    let from = 0, width = 1000;
    const show = () => {
      width = Math.min(1000, Math.max(1, width));
      from = Math.min(1000 - width, Math.max(0, from));
      all("svg", figure).forEach((svg) => svg.setAttribute("viewBox", `${from} 0 ${width} 20`));
      const at = (place) => (begin + (end - begin) * place / 1000).toPrecision(5).replace(/\.?0+$/, "");
      ends[0].textContent = at(from);
      ends[1].textContent = at(from + width);
    };
    const moves = { in: () => { from += width / 4; width /= 2; }, out: () => { from -= width / 2; width *= 2; },
      left: () => { from -= width / 2; }, right: () => { from += width / 2; }, all: () => { from = 0; width = 1000; } };
    figure.querySelector(".zoom").hidden = false;
    all("[data-zoom]", figure).forEach((button) => button.addEventListener("click", () => { moves[button.dataset.zoom](); show(); }));
    show();
  }
})();
