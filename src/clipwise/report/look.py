"""How the page looks and behaves: its style sheet and its few lines of script.

Receives: nothing.
Gives: STYLE and SCRIPT, which a page holds inside itself.
"""

# Eight hues that also differ for colour-blind readers, each in a version for light and for dark paper, on which its
# contrast is at least 3, as lines need it (WCAG 1.4.11).
HUES = ("#2a78d6", "#e2602b", "#13936a", "#b98000", "#dd5f90", "#007500", "#4a3aa7", "#d93b3a")
_HUES_DARK = ("#3987e5", "#e0703c", "#1fae7c", "#d29a1c", "#d8618e", "#3da53d", "#9085e9", "#e66767")
_LIGHT = (
    "--paper:#f7f7f4;--card:#ffffff;--ink:#141413;--soft:#52514e;--faint:#6b6a65;--rule:#e3e2dc;--axis:#b9b8b0;"
    "--link:#1c5cab;--warn:#fdf3d7;--warn-ink:#5c4300;--false:#fde3e1;--false-ink:#8a1410;"
    + "".join(f"--s{number}:{hue};" for number, hue in enumerate(HUES))
)
_DARK = (
    "--paper:#111110;--card:#1b1b1a;--ink:#f4f3ef;--soft:#c3c2b7;--faint:#a3a299;--rule:#30302d;--axis:#55544f;"
    "--link:#86b6ef;--warn:#33290f;--warn-ink:#f3dfa6;--false:#43191a;--false-ink:#ffc9c4;"
    + "".join(f"--s{number}:{hue};" for number, hue in enumerate(_HUES_DARK))
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
h1,.sub{overflow-wrap:anywhere}
#theme{position:absolute;right:20px;top:22px}
button{font:inherit;font-size:14px;color:var(--ink);background:var(--card);border:1px solid var(--axis);
border-radius:8px;padding:6px 12px;cursor:pointer}
a{color:var(--link);text-underline-offset:2px}
:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:4px}
section{margin:0 0 36px}
.answer{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:22px 26px 20px;margin-top:14px;
display:grid;grid-template:auto auto/minmax(0,1fr);gap:0 44px}
.answer p{max-width:78ch;margin:0 0 10px}
.answer .lead-in{font-size:21px;line-height:1.4;margin-bottom:14px}
.answer .warn{background:var(--warn);color:var(--warn-ink);padding:9px 13px;border-radius:8px;font-size:14px;
margin:10px 0 0;max-width:none}
.false{background:var(--false);color:var(--false-ink);padding:9px 13px;border-radius:8px}
.answer figure{border:0;padding:0;margin-bottom:14px}
@media(min-width:901px){
.answer:has(figure){grid-template-columns:minmax(0,1fr) minmax(0,440px)}
.answer figure{grid-area:1/2/3/3}
.answer .warn{grid-column:1/-1}
}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px;align-items:stretch}
.pair figure:only-child:not(.many){max-width:620px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:18px 20px 14px;
min-width:0}
figure.many{grid-column:1/-1}
figcaption p{color:var(--soft);font-size:14px;line-height:1.45;margin:0 0 12px;max-width:80ch}
.many .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:18px 22px}
.chart{display:block;width:100%;max-width:560px;height:auto;overflow:visible;font-size:12px}
.chart+.chart{margin-top:6px}
.many .chart{margin:0;max-width:290px}
.chart text{fill:var(--soft)}
.many .chart .head,.chart .name{fill:var(--ink)}
.many .chart .head{font-weight:600}
.chart .end{text-anchor:end}.chart .mid{text-anchor:middle}
.chart .tick{font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--rule)}.chart .axis{stroke:var(--axis)}
.chart .rule{stroke:var(--soft);stroke-width:1.3;stroke-dasharray:5 4}
.chart .s{transition:opacity .12s}
.chart .s polyline{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.chart .s .lead{stroke-width:1;opacity:.8;stroke-dasharray:1 3}
.chart .s circle{fill:var(--c);stroke:var(--card);stroke-width:1.2}
.chart .s rect{fill:var(--c)}.chart .s polygon{fill:var(--c)}
.chart .plain{--c:var(--axis)}
[data-on] .chart .s[data-run]{opacity:.14}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:14px;
background:linear-gradient(to left,var(--card) 40%,transparent) right/44px 100% no-repeat local,
linear-gradient(to left,color-mix(in srgb,var(--ink) 22%,transparent),transparent) right/16px 100% no-repeat scroll,
var(--card)}
table{border-collapse:collapse;width:100%;font-size:15px}
th,td{padding:9px 14px;text-align:left;border-top:1px solid var(--rule);vertical-align:baseline}
thead th{border-top:0;vertical-align:top;font-weight:600}
th small{display:block;color:var(--faint);font-weight:400;font-size:12.5px;line-height:1.3}
thead small{max-width:13ch;margin-left:auto}
tbody th{font-weight:500}
#runs tbody th{padding-left:33px;text-indent:-19px}
#runs tbody th small{text-indent:0;max-width:34ch}
#runs tbody th{overflow-wrap:anywhere;min-width:190px}
.num{text-align:right;font-variant-numeric:tabular-nums}
.best,.best th{font-weight:700}
.word{white-space:nowrap}
thead button{white-space:nowrap;border:0;background:none;padding:2px 0;font-weight:600;font-size:15px}
thead button:hover{text-decoration:underline}
th[aria-sort=ascending] button::after{content:" ▲";content:" ▲"/"";font-size:10px}
th[aria-sort=descending] button::after{content:" ▼";content:" ▼"/"";font-size:10px}
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
.chart{font-size:14px}
.many .charts{grid-template-columns:1fr 1fr;gap:14px 12px}
th,td{padding:8px 10px}
#runs th:first-child{position:sticky;left:0;background:var(--card)}
#runs tbody th small,#runs thead small{display:none}
#runs tbody th{min-width:140px;padding-left:31px}
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
