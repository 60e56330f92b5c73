"""What the page shows, as plain data: the model as a column of layers, each with its reductions and experts.

    {"layers": [{"name", "alike", "items": [{"block"} | {"site"} | {"experts"}]}],   in the model's order
     "folds": [{"start", "period", "repeats"}],                                      runs of layers that are alike
     "sites", "experts", "pictures", "times", "totals", "host", "gate", "notes", ...}

A layer is what stands under the first number of a module path: `model.layers.3`. A part is what follows: `self_attn`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphfuse.page.advice import advice, general
from graphfuse.page.folding import fold
from graphfuse.page.savings import BYTES, times, why_none
from graphfuse.report_experts import ExpertsReport
from graphfuse.report_graph import Surroundings

if TYPE_CHECKING:
    from graphfuse.report import Report, SiteReport

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
TOP = "(top)"


def page_data(report: Report, title: str) -> dict[str, Any]:
    """The document that the page's scripts draw."""
    measured = times(report.gate)
    pictures: dict[Surroundings, int] = {}
    sites = [_site(site, measured, pictures) for site in report.sites]
    experts = [_experts(layer) for layer in report.moe]
    layers = _layers(sites, experts)
    for site in sites:
        if any(
            "experts" in item and experts[item["experts"]]["part"] == site["part"] for item in layers[site["layer"]]
        ):
            site["kind"] += " with experts"
    folds = fold([_signature(items, sites, experts) for items in layers.values()])
    return {
        "title": title,
        "headline": report.headline(),
        "traced": report.traced,
        "totals": report.totals,
        "host": _host(report.gate.get("facts", {})),
        "sites": sites,
        "experts": experts,
        "layers": [{"name": name, "items": items} for name, items in layers.items()],
        "folds": [{"start": f.start, "period": f.period, "repeats": f.repeats} for f in folds],
        "pictures": [_picture(around) for around in pictures],
        "times": measured,
        "why_no_times": None if measured else why_none(report.gate),
        "gate": list(report.gate.get("reasons", ())),
        "notes": list(report.notes),
        "placements": {key: report.placements[key] for key in ("proved", "unknown") if key in report.placements},
        "rules": [{"name": name, **counts} for name, counts in report.rules.items()],
        "seconds": {name: round(value, 2) for name, value in report.seconds.items()},
        "graphs": report.num_graphs,
    }


def _site(site: SiteReport, measured: list[dict[str, Any]], pictures: dict[Surroundings, int]) -> dict[str, Any]:
    layer, part = _place(site.module)
    around = site.surroundings
    served = site.served_as and (str(site.served_as[0]).removeprefix("torch."), site.served_as[1])
    closest = max((d.closeness for d in site.declines), default=0)
    return {
        "id": site.id,
        "module": site.module or TOP,
        "norm": site.norm,
        "status": site.status,
        "op": site.op,
        "layer": layer,
        "part": part,
        "kind": part,
        "chain": _chain(around),
        "merged_into": site.merged_into,
        "backends": [dict(entry) for entry in site.backends],
        "reasons": _reasons(site.declines, closest),
        "dtype": around.dtype if around else (served[0] if served else ""),
        "shape": around.shape if around else "",
        "picture": None if around is None else pictures.setdefault(around, len(pictures)),
        "row_bytes": served and served[1] * BYTES.get(served[0], 0),
        "times": next((i for i, t in enumerate(measured) if served == (t["dtype"], t["hidden"])), None),
    }


def _reasons(declines: Iterable[Any], closest: int) -> list[dict[str, Any]]:
    """Each reason once, those of the rules that came closest first."""
    ordered = sorted(declines, key=lambda d: d.closeness != closest)
    first = {d.reason: d for d in reversed(ordered)}
    return [
        {
            "rule": first[reason].rule,
            "text": reason,
            "general": general(reason),
            "advice": advice(reason),
            "main": first[reason].closeness == closest,
        }
        for reason in dict.fromkeys(d.reason for d in ordered)
    ]


def _experts(layer: ExpertsReport) -> dict[str, Any]:
    name, part = _place(layer.module)
    declines = _reasons(layer.declines, max((d.closeness for d in layer.declines), default=0))
    return {
        "module": layer.module or TOP,
        "layer": name,
        "part": part,
        "kind": f"{part} with experts",
        "status": layer.status,
        "sizes": layer.sizes().removeprefix("of "),
        "count": layer.experts,
        "top_k": layer.top_k,
        "config": layer.config,
        "files": list(layer.files),
        "notes": list(layer.notes),
        "reasons": declines,
    }


def _place(module: str) -> tuple[str, str]:
    """(layer, part): ("layers.3", "self_attn") for `layers.3.self_attn.o_proj`, ("embed_tokens",) * 2 without a
    number."""
    found = _LAYER.match(module)
    if found is None:
        return module or TOP, (module or TOP).rpartition(".")[2]
    rest = module[found.end() :].strip(".")
    return found[0], rest.split(".")[0] if rest else found[0].rpartition(".")[0].rpartition(".")[2] or TOP


def _layers(sites: list[dict[str, Any]], experts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The items of each layer: a block for each part, then what it ends in. Experts stand where their part does."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for site in sites:
        items = layers.setdefault(site["layer"], [])
        if not any(item.get("part") == site["part"] for item in items):
            items.append({"part": site["part"]})
        items.append({"site": site["id"]})
    for index, layer in enumerate(experts):
        items = layers.setdefault(layer["layer"], [])
        parts = [item.get("part") for item in items]
        if layer["part"] not in parts:
            items.append({"part": layer["part"]})
            parts = [item.get("part") for item in items]
        items.insert(parts.index(layer["part"]) + 1, {"experts": index})
    return layers


def _signature(items: list[dict[str, Any]], sites: list[dict[str, Any]], experts: list[dict[str, Any]]) -> tuple:
    """What two layers must have in common to be alike: everything that the page shows, but the numbers in paths."""
    return tuple(
        _without_place(sites[item["site"]])
        if "site" in item
        else (_without_place(experts[item["experts"]]) if "experts" in item else item["part"])
        for item in items
    )


def _without_place(entry: dict[str, Any]) -> str:
    kept = {key: value for key, value in entry.items() if key not in ("id", "layer", "reasons", "picture")}
    for key in ("module", "norm", "merged_into"):
        if kept.get(key):
            kept[key] = re.sub(r"\d+", "*", kept[key])
    return repr((kept, [reason["general"] for reason in entry["reasons"]]))


def _chain(around: Surroundings | None) -> list[str]:
    """The ops behind the reduction as words, up to the norm: all_reduce, add, rms_norm."""
    if around is None or around.before is None:
        return ["all_reduce"]
    boxes, edges = around.before.boxes, around.before.edges
    at = around.before.start
    chain = [boxes[at].label]
    while boxes[at].role != "norm" and len(chain) < 5:
        behind = [end for start, end, _ in edges if start == at]
        if not behind:
            break
        at = min(behind, key=lambda i: (boxes[i].role != "norm", boxes[i].role != "add", i))
        chain.append(boxes[at].label)
    return chain


def _picture(around: Surroundings) -> dict[str, Any]:
    return {
        "before": around.before.to_json() if around.before else None,
        "after": around.after.to_json() if around.after else None,
    }


def _host(facts: dict[str, Any]) -> str:
    """The group in a few words."""
    if not facts:
        return ""
    ranks = facts["world_size"]
    if facts["device_type"] != "cuda":
        return f"{ranks} rank{'s' * (ranks != 1)} on the CPU"
    words = [f"{ranks} × {facts['gpu'] or 'different GPUs'}", "one host" if facts["one_host"] else "several hosts"]
    if facts["one_host"] and facts["nvlink_mesh"] is not None:
        words.append("NVLink between all" if facts["nvlink_mesh"] else "without NVLink")
    return ", ".join(words)
