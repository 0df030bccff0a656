"use strict";
(() => {
  const start = JSON.parse(document.getElementById("playground-data").textContent);
  const REST = 60; // calls without a change after which training rests
  const page = `${Date.now()}-${Math.random().toString(36).slice(2)}`;
  const find = (id) => document.getElementById(id);
  let points = start.points.map((point) => [...point]), bands = null, version = 0, calls = 0, busy = false, restart = false;

  const Z50 = 0.6745, Z95 = 1.96;
  const stretch = (factor, std) => bands.mean.map((mean, i) => mean + factor * (Array.isArray(std) ? std[i] : std));

  function band(name, z, std, color, deep) {
    return { name, kind: "band", color, deep, x: bands.x, y: stretch(z, std), low: stretch(-z, std) };
  }

  function spec(title, std, color) {
    const series = [];
    if (bands) {
      series.push(band("95 % interval", Z95, std, color, false), band("50 % interval", Z50, std, color, true));
      series.push({ name: "mean", kind: "line", color, x: bands.x, y: bands.mean });
    }
    const sorted = [...points].sort((a, b) => a[0] - b[0]);
    series.push({ name: "points", kind: "dots", color: "ink", quiet: true, x: sorted.map((p) => p[0]), y: sorted.map((p) => p[1]) });
    return {
      alt: `${title}: ${points.length} points with the predictive mean and its 50 % and 95 % intervals.`,
      x: { label: "x", min: -start.range, max: start.range },
      y: { label: "y", min: -start.range, max: start.range },
      height: 360,
      series,
    };
  }

  const views = [["mcbn", "MCBN", "blue", () => bands && bands.std], ["twin", "Constant uncertainty", "red", () => bands && bands.constant_std]];
  const charts = {};

  function redraw() {
    for (const [name, title, color, std] of views) {
      const next = spec(title, std(), color);
      if (charts[name]) charts[name].update(next);
      else {
        charts[name] = mcbn.chart(find(`chart-${name}`), next);
        charts[name].svg.addEventListener("click", (event) => click(charts[name], event));
      }
    }
  }

  /* A click near a point removes it, elsewhere it adds one. */
  function click(chart, event) {
    const where = chart.position(event), limit = start.range;
    if (Math.abs(where.x) > limit || Math.abs(where.y) > limit) return;
    const close = points.findIndex((p) => Math.hypot(p[0] - where.x, p[1] - where.y) < 0.25);
    if (close >= 0) points.splice(close, 1);
    else return add(where.x, where.y);
    change();
  }

  function add(x, y) {
    if (points.length >= start.most) return tell(`${start.most} points are the most`);
    points.push([+x.toFixed(3), +y.toFixed(3)]);
    change();
  }

  function addTyped() {
    const [x, y] = ["x", "y"].map((name) => find(`new-${name}`).valueAsNumber);
    if (Math.abs(x) <= start.range && Math.abs(y) <= start.range) add(x, y);
    else tell(`x and y must be numbers from ${-start.range} to ${start.range}`);
  }

  function change() {
    version++;
    calls = 0;
    redraw();
    step();
  }

  function settings() {
    const tune = find("tune").checked;
    return { batch_size: +find("batch-size").value, n_samples: +find("n-samples").value, tau: tune ? null : 10 ** +find("tau").value };
  }

  async function step() {
    if (busy || calls >= REST || document.hidden) return;
    if (points.length < 2) return tell("add two points or more");
    busy = true;
    const asked = version;
    try {
      const body = JSON.stringify({ page, points, restart, ...settings() });
      restart = false;
      const answer = await fetch("/bands", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      calls++;
      if (points.length >= 2) bands = found;
      document.body.dataset.answered = asked;
      report(found);
      redraw();
      busy = false;
      setTimeout(step, 20);
    } catch (error) {
      busy = false;
      tell(`the playground's server does not answer (${error.message}); start it again and reload`);
    }
  }

  const tell = (text) => { find("status").textContent = text; };

  function report(found) {
    find("tau-value").textContent = found.tau.toPrecision(3);
    if (find("tune").checked) find("tau").value = Math.log10(found.tau);
    const state = calls >= REST ? "rests until something changes" : "learning";
    tell(`${points.length} points; ${found.steps} training steps, ${state}; this answer took ${found.seconds.toFixed(2)} s; constant std ${found.constant_std.toPrecision(3)}`);
  }

  for (const id of ["batch-size", "n-samples"]) {
    find(id).addEventListener("input", () => { find(`${id}-value`).textContent = find(id).value; change(); });
  }
  find("tau").addEventListener("input", () => { find("tune").checked = false; change(); });
  find("tune").addEventListener("change", change);
  find("restart").addEventListener("click", () => { restart = true; change(); });
  find("add").addEventListener("click", addTyped);
  find("clear").addEventListener("click", () => { points = []; bands = null; change(); });
  find("toy").addEventListener("click", () => { points = start.points.map((point) => [...point]); change(); });
  document.addEventListener("visibilitychange", step);
  document.body.dataset.answered = -1;
  redraw();
  step();
})();
