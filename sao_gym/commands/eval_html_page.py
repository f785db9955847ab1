"""The fixed parts of an evaluation's page: its style, its one script, and the head that allows nothing else to run.

Invariant: no text of an evaluation is in here. The page's policy names the script by its hash, so a browser runs that
script and no other, and fetches nothing.
"""

import base64
import hashlib

from sao_gym.commands.html_markup import Markup, join, tag

STYLE = Markup("""
:root{--ink:#1d2430;--soft:#5d6878;--line:#d8dde5;--ground:#fff;--raised:#f5f7fa;--act:#eef4ff;--right:#2b8a3e;
--wrong:#c92a2a;--noanswer:#e67700;--truncated:#9c36b5;--error:#495057;--noverdict:#868e96}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa5b4;--line:#363d49;--ground:#14181f;--raised:#1c222b;
--act:#1a2740;--right:#51cf66;--wrong:#ff6b6b;--noanswer:#ffa94d;--truncated:#da77f2;--error:#adb5bd}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:68rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.25rem;margin-top:2.5rem;border-bottom:1px solid var(--line)}h3{font-size:1rem}
table{border-collapse:collapse;margin:.5rem 0}th,td{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}
.figures th{font-weight:500;color:var(--soft);white-space:nowrap}.figures td:nth-child(2){font-variant-numeric:tabular-nums;white-space:nowrap}
.figures td:nth-child(3){color:var(--soft)}
.problems{font-variant-numeric:tabular-nums;font-size:.9em}.problems thead th{border-bottom:1px solid var(--line)}
.problems td:not(:first-child),.problems th:not(:first-child){text-align:right}
.problems button{all:unset;cursor:pointer}.problems button:focus-visible{outline:2px solid}
[aria-sort=ascending] button::after{content:" \\2191"}[aria-sort=descending] button::after{content:" \\2193"}
.scroll{overflow-x:auto}.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 20rem;max-width:30rem}
figcaption{color:var(--soft);font-size:.85em}svg{width:100%;height:auto;font-size:11px}svg text{fill:var(--soft)}
.axis{stroke:var(--line)}.s0{fill:var(--right)}.s1{fill:var(--wrong)}.s2{fill:var(--error)}
.note{border-left:4px solid var(--noanswer);padding:.2rem .8rem;background:var(--raised)}
details{border:1px solid var(--line);border-radius:4px;margin:.3rem 0}summary{cursor:pointer;padding:.2rem .6rem}
details>div{padding:.2rem .8rem .6rem}.problem>summary{background:var(--raised)}
.mark{font-weight:600}.right .mark,.mark.right{color:var(--right)}.wrong .mark,.mark.wrong{color:var(--wrong)}
.no-answer .mark,.mark.no-answer{color:var(--noanswer)}.truncated .mark,.mark.truncated{color:var(--truncated)}
.error .mark,.mark.error{color:var(--error)}.soft{color:var(--soft);font-size:.9em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0 .8rem;padding:.5rem .7rem;background:var(--raised);
font:13px/1.45 ui-monospace,monospace;unicode-bidi:isolate;border-radius:4px}pre.action{background:var(--act)}
.cut{color:var(--noanswer);font-style:italic}fieldset{border:0;padding:0;margin:.5rem 0}
.problem{content-visibility:auto;contain-intrinsic-size:auto 2rem}
""")

SCRIPT = Markup("""
for (const table of document.querySelectorAll("table.problems")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b), gap = column ? Number(x) - Number(y) : x.localeCompare(y, undefined, {numeric: true});
        return down ? -gap : gap;
      });
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}
const open = () => {
  const found = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (found) found.open = true;
};
addEventListener("hashchange", open);
open();
""")


def page(title: str, *content: Markup) -> Markup:
    """A whole document."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", STYLE),
    )
    body = tag("body", tag("main", *content), tag("script", SCRIPT))
    return join([Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), "\n"])
