"""How the page looks and behaves: its style sheet and its few lines of script.

Receives: nothing.
Gives: STYLE and SCRIPT, which a page holds inside itself.
"""

# Eight hues that also differ for colour-blind readers, each in a version for light and for dark paper.
_LIGHT = (
    "--paper:#f7f7f4;--card:#ffffff;--ink:#141413;--soft:#52514e;--faint:#6b6a65;--rule:#e3e2dc;--axis:#b9b8b0;"
    "--link:#1c5cab;--warn:#fdf3d7;--warn-ink:#5c4300;"
    "--s0:#2a78d6;--s1:#eb6834;--s2:#1baf7a;--s3:#d99400;--s4:#e06a98;--s5:#008300;--s6:#4a3aa7;--s7:#e34948;"
)
_DARK = (
    "--paper:#111110;--card:#1b1b1a;--ink:#f4f3ef;--soft:#c3c2b7;--faint:#a3a299;--rule:#30302d;--axis:#55544f;"
    "--link:#86b6ef;--warn:#33290f;--warn-ink:#f3dfa6;"
    "--s0:#3987e5;--s1:#e0703c;--s2:#1fae7c;--s3:#d29a1c;--s4:#d8618e;--s5:#3da53d;--s6:#9085e9;--s7:#e66767;"
)

STYLE = (
    ":root{color-scheme:light dark;"
    + _LIGHT
    + "}@media(prefers-color-scheme:dark){:root{"
    + _DARK
    + "}}:root[data-theme=light]{color-scheme:light;"
    + _LIGHT
    + "}:root[data-theme=dark]{color-scheme:dark;"
    + _DARK
    + "}"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main{max-width:1200px;margin:0 auto;padding:0 20px}
header{padding-top:24px;position:relative}
.brand{margin:0 0 10px;color:var(--faint);font-size:14px;letter-spacing:.02em}
h1{font-size:30px;line-height:1.2;margin:0 130px 6px 0;text-wrap:balance}
h2{font-size:21px;margin:0 0 12px}
h3{font-size:16px;margin:0 0 2px}
.sub{color:var(--soft);margin:0 0 14px;font-size:14.5px}
#theme{position:absolute;right:20px;top:22px}
button{font:inherit;font-size:14px;color:var(--ink);background:var(--card);border:1px solid var(--axis);
border-radius:8px;padding:6px 12px;cursor:pointer}
a{color:var(--link);text-underline-offset:2px}
:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:4px}
section{margin:0 0 36px}
.answer{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:22px 26px 20px;margin-top:14px}
.answer p{max-width:78ch;margin:0 0 8px}
.answer .lead-in{font-size:21px;line-height:1.4;margin-bottom:12px}
.answer .warn{background:var(--warn);color:var(--warn-ink);padding:9px 13px;border-radius:8px;font-size:14px;
margin:14px 0 0;max-width:none}
.pair,.trio{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px;
align-items:stretch}
.trio{grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:18px 20px 14px;
min-width:0}
figure.many{grid-column:1/-1}
figcaption p{color:var(--soft);font-size:14px;line-height:1.45;margin:0 0 12px;max-width:80ch}
.many .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:18px 22px}
.chart{display:block;width:100%;max-width:560px;height:auto;overflow:visible;font-size:12px}
.trio .chart{font-size:13px}
.chart+.chart{margin-top:6px}
.many .chart{font-size:12px;margin:0;max-width:290px}
.chart text{fill:var(--soft)}
.chart .head{fill:var(--soft)}
.many .chart .head,.chart .name{fill:var(--ink)}
.many .chart .head{font-weight:600}
.chart .end{text-anchor:end}.chart .mid{text-anchor:middle}
.chart .tick{font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--rule)}.chart .axis{stroke:var(--axis)}
.chart .rule{stroke:var(--soft);stroke-width:1.3;stroke-dasharray:5 4}
.chart .s{transition:opacity .12s}
.chart .s polyline{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.chart .s .lead{stroke-width:1;opacity:.6}
.chart .s circle{fill:var(--c);stroke:var(--card);stroke-width:1.2}
.chart .s rect{fill:var(--c)}.chart .s polygon{fill:var(--c)}
.chart .plain{--c:var(--axis)}
[data-on] .chart .s[data-run]{opacity:.14}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:14px}
table{border-collapse:collapse;width:100%;font-size:15px}
th,td{padding:9px 14px;text-align:left;border-top:1px solid var(--rule);vertical-align:baseline}
thead th{border-top:0;vertical-align:top;font-weight:600}
th small{display:block;color:var(--faint);font-weight:400;font-size:12.5px;line-height:1.3}
thead small{max-width:13ch;margin-left:auto}
tbody th{font-weight:500}
#runs tbody th small{margin-left:19px;word-break:break-word;max-width:34ch}
.num{text-align:right;font-variant-numeric:tabular-nums}
.best{font-weight:700}
thead button{white-space:nowrap;border:0;background:none;padding:2px 0;font-weight:600;font-size:15px}
thead button:hover{text-decoration:underline}
th[aria-sort=ascending] button::after{content:" ▲";font-size:10px}
th[aria-sort=descending] button::after{content:" ▼";font-size:10px}
tbody tr:hover{background:color-mix(in srgb,var(--rule) 35%,transparent)}
.swatch{display:inline-block;width:11px;height:11px;border-radius:50%;background:var(--c);margin-right:8px}
details{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:10px 14px;margin:0 0 8px}
details p{margin:8px 0}
summary{cursor:pointer}
pre{overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;margin:10px 0 4px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media(max-width:640px){
header,main{padding:0 14px}
header{padding-top:16px}
h1{font-size:24px;margin-right:0}
#theme{right:14px;top:11px}
.answer{padding:16px 16px 14px}
.answer .lead-in{font-size:18px}
figure{padding:14px 14px 10px}
.chart{font-size:15px}
.trio .chart{font-size:14px}
.many .charts{grid-template-columns:1fr 1fr;gap:14px 12px}
.many .chart{font-size:14px}
th,td{padding:8px 10px}
#runs th:first-child{position:sticky;left:0;background:var(--card)}
#runs tbody th small,#runs thead small{display:none}
#runs tbody th{white-space:nowrap}
}
@media(prefers-reduced-motion:reduce){.chart .s{transition:none}}
@media print{#theme{display:none}body{background:#fff}figure,.answer{break-inside:avoid}}
"""
)

SCRIPT = """
(function(){
var root=document.documentElement,button=document.getElementById('theme');
function kept(value){try{if(value)localStorage.setItem('clipwise-theme',value);
return localStorage.getItem('clipwise-theme')}catch(e){return null}}
var was=kept();if(was)root.dataset.theme=was;
button.addEventListener('click',function(){
var dark=root.dataset.theme?root.dataset.theme==='dark':matchMedia('(prefers-color-scheme: dark)').matches;
root.dataset.theme=dark?'light':'dark';kept(root.dataset.theme)});
function on(event){var at=event.target.closest&&event.target.closest('[data-run]');
if(at)root.dataset.on=at.dataset.run;else delete root.dataset.on}
document.addEventListener('pointerover',on);
document.addEventListener('focusin',on);
document.addEventListener('pointerleave',function(){delete root.dataset.on});
document.querySelectorAll('#runs thead th').forEach(function(head,column){
head.querySelector('button').addEventListener('click',function(){
var up=head.getAttribute('aria-sort')!=='ascending';
document.querySelectorAll('#runs thead th').forEach(function(other){other.setAttribute('aria-sort','none')});
head.setAttribute('aria-sort',up?'ascending':'descending');
var body=document.querySelector('#runs tbody'),lines=Array.from(body.rows);
function value(line){return line.cells[column].dataset.v}
lines.sort(function(a,b){var x=value(a),y=value(b);
if(x===''||y==='')return (x==='')-(y==='');
var order=column?parseFloat(x)-parseFloat(y):x.localeCompare(y);return up?order:-order});
lines.forEach(function(line){body.appendChild(line)})})});
function opened(){var at=location.hash&&document.getElementById(location.hash.slice(1));
if(at&&at.tagName==='DETAILS')at.open=true}
addEventListener('hashchange',opened);opened();
})();
"""
