// SPDX-License-Identifier: Apache-2.0
// Which metrics stand together on the page, and which share a chart. docs/metrics.md says what each one is.

const GROUPS = [
  {
    title: "Reward",
    open: true,
    has: /^(reward(\/|_)|groups\/sol|heldout\/(score|solved|pass@)|heldout\/.+\/score|score|accuracy|heldout\/accuracy)/,
  },
  {
    title: "Loss",
    open: true,
    has: /^(loss$|heldout\/(.+\/)?loss$|source\/.+\/loss|divergence|cross_entropy|agreement|value\/|heldout\/(divergence|cross_entropy|agreement))/,
  },
  {
    title: "Lengths",
    open: true,
    has: /^(response\/|prompt\/|turns\/|episodes\/truncated|heldout\/(length|truncated))/,
  },
  { title: "KL", open: true, has: /(^|\/)kl(\/|$)|^kl/ },
  { title: "Entropy", open: true, has: /^entropy/ },
  { title: "Staleness and gap", open: true, has: /^(staleness\/|gap\/|ratio\/|correction\/)/ },
  { title: "Throughput", open: true, has: /(tokens_per_s|^step_s|^idle_s|rollout\/idle_s)$/ },
  { title: "MFU", open: true, has: /(^|\/)mfu$/ },
  { title: "Time of phases", open: false, has: /^(time\/|lending\/|data_wait_s)|_s$/ },
  {
    title: "Optimization",
    open: false,
    has: /^(lr|grad_norm|skipped|clip\/|advantage\/|optimizer_steps|trained_tokens|micro_steps|imbalance)/,
  },
];

// Charts with several metrics of one run. The rest has a chart each.
const FAMILIES = [
  { title: "reward by component", has: /^reward\/(?!source\/|extra\/)([^/]+)\/mean$/, group: "Reward" },
  { title: "reward by source", has: /^reward\/source\/(.+)\/mean$/, group: "Reward" },
  { title: "held-out score by source", has: /^heldout\/(.+)\/score$/, group: "Reward" },
  { title: "loss by source", has: /^source\/(.+)\/loss$/, group: "Loss" },
  { title: "held-out loss by source", has: /^heldout\/(.+)\/loss$/, group: "Loss" },
  { title: "solved groups", has: /^groups\/(solved_all|solved_none|solved_some)$/, group: "Reward" },
  { title: "response length", has: /^response\/(mean|max|min)$/, group: "Lengths" },
  { title: "tokens by age", has: /^staleness\/tokens\/(.+)$/, group: "Staleness and gap" },
  {
    title: "tokens per second",
    has: /^(tokens_per_s|rollout\/tokens_per_s|update\/tokens_per_s)$/,
    group: "Throughput",
  },
  { title: "MFU", has: /^(mfu|update\/mfu)$/, group: "MFU" },
  {
    title: "seconds of phases",
    has: /^time\/(rollout|wait|grade|score|update|publish|residency|lend|other)_s$/,
    group: "Time of phases",
  },
];
const FIRST = [
  "reward/mean",
  "heldout/score",
  "loss",
  "heldout/loss",
  "response/mean",
  "kl/reference",
  "entropy",
  "staleness/mean",
  "tokens_per_s",
  "step_s",
  "mfu",
];

const KEY_CURVES = ["reward/mean", "heldout/score", "heldout/loss", "loss", "response/mean", "staleness/mean", "entropy"];
const MOST_KEY_CURVES = 6;

/** The metrics of the overview, of those that a run has. */
export function keyMetrics(names) {
  const learnsFromRewards = names.includes("reward/mean");
  const wanted = KEY_CURVES.filter((name) => !(learnsFromRewards && name === "loss"));
  return [...wanted, "step_s"].filter((name) => names.includes(name)).slice(0, MOST_KEY_CURVES);
}

/** [{title, open, charts: [{title, metrics: [{name, label}]}]}]. With `single` each metric has a chart of its own. */
export function metricGroups(names, single = false) {
  const groups = [
    ...GROUPS.map((group) => ({ ...group, charts: [] })),
    { title: "All others", open: false, charts: [] },
  ];
  const inFamily = new Set();
  if (!single)
    for (const family of FAMILIES) {
      const found = names.filter((name) => family.has.test(name) && !inFamily.has(name));
      if (found.length < 2) continue;
      found.forEach((name) => inFamily.add(name));
      groups
        .find((group) => group.title === family.group)
        .charts.push({
          title: family.title,
          metrics: found.map((name) => ({ name, label: family.has.exec(name)[1] ?? name })),
        });
    }
  for (const name of names) {
    if (inFamily.has(name)) continue;
    const group = groups.find((each) => !each.has || each.has.test(name));
    group.charts.push({ title: name, metrics: [{ name, label: name }] });
  }
  const place = (chart) => {
    const at = FIRST.indexOf(chart.metrics[0].name);
    if (at >= 0) return at;
    return FIRST.length + (chart.metrics.length > 1 ? 0 : /\/(std|max|min)$/.test(chart.title) ? 2 : 1);
  };
  for (const group of groups)
    group.charts.sort((a, b) => place(a) - place(b) || a.title.localeCompare(b.title, "en", { numeric: true }));
  return groups.filter((group) => group.charts.length);
}
