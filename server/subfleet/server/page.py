"""The page at `/`: the newest run's rounds as a table that refreshes itself. No network but this server's API."""

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Subfleet</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
  th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
  th:first-child, td:first-child, td:last-child, th:last-child { text-align: left }
  caption { text-align: left; font-weight: 600; padding: 1rem 0 .25rem }
  .scroll { overflow-x: auto }
</style>
</head>
<body>
<h1>Subfleet</h1>
<p id="state" role="status">Loading.</p>
<div id="rounds" class="scroll"></div>
<p><a href="/docs">HTTP API</a></p>
<script>
const COLUMNS = ["device", "runtime", "free MB", "budget MB", "subnet", "planned MB", "measured MB", "kB down", "kB up",
                 "seconds", "loss", "state"];
const mega = (bytes) => bytes === null ? "-" : (bytes / 1e6).toFixed(1);
const cells = (row) => [`${row.client_id} (${row.device})`, row.runtime || "-", mega(row.memory_free_bytes),
  mega(row.budget_bytes), row.spec || "-", mega(row.planned_peak_bytes), mega(row.measured_peak_bytes),
  (row.bytes_down / 1000).toFixed(1), (row.bytes_up / 1000).toFixed(1), row.seconds.toFixed(2), row.loss.toFixed(3),
  row.status];
const line = (kind, texts) => {
  const row = document.createElement("tr");
  for (const text of texts) {
    const cell = document.createElement(kind);
    cell.textContent = text;
    row.append(cell);
  }
  return row;
};
const table = (record) => {
  const made = document.createElement("table");
  const caption = document.createElement("caption");
  caption.textContent = `Round ${record.round}: accuracy ${record.accuracy.toFixed(4)}, ${record.seconds.toFixed(1)} s`;
  made.append(caption, line("th", COLUMNS), ...record.clients.map((row) => line("td", cells(row))));
  return made;
};
const get = async (path) => {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
};
const refresh = async () => {
  const state = document.getElementById("state");
  try {
    const runs = await get("/api/runs");
    if (runs.length === 0) {
      state.textContent = "No run yet.";
    } else {
      const run = runs[0];
      const rounds = await get(`/api/runs/${encodeURIComponent(run.run_id)}/rounds`);
      state.textContent = `Run ${run.run_id}: ${run.phase}, round ${run.round} of ${run.round_count}`;
      document.getElementById("rounds").replaceChildren(...rounds.reverse().map(table));
    }
  } catch (error) {
    state.textContent = `The server does not answer (${error.message}); trying again.`;
  }
  setTimeout(refresh, 2000);
};
refresh();
</script>
</body>
</html>
"""
