"""Rules about context parallelism: how keys and values meet queries (parallel.cp_comm).

a2a gives each rank of cp a part of the heads for the full sequence, so tp x cp divides attention
heads and kv heads; a2a+p2p exchanges within groups of cp_a2a_size ranks, so tp x cp_a2a_size does.
What else a type cannot do is that of Transformer Engine (dot_product_attention/utils.py) and, under
mpctl's profile, of mpctl's layers.

By hand, 8 kv heads, tp 2: a2a runs with cp 2 and 4; cp 8 needs a2a+p2p with cp_a2a_size 2 or 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.rules.check import Check, listed, refusal
from mpctl.plan.rules.sizes import deals_heads, deals_kv_heads
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import EXCHANGES, CpComm
from mpctl.spec.runtime import RuntimeProfile

WHERE, SIZE, BOTH = "parallel.cp_comm", "parallel.cp_a2a_size", "a2a+p2p"


def exchange_rules(draft: LayoutDraft) -> Iterator[Check]:
    """cp_comm is of cp above 1 and of the runtime, and cp_a2a_size of a2a+p2p, whose ranks it cuts."""
    p, runs = draft.job.parallel, draft.profile.runs
    is_both = p.cp_comm == BOTH
    if p.cp_comm and p.cp == 1:
        more = "no cp_comm, or cp above 1"
        yield refusal("cp-comm-needs-cp", WHERE, f"{p.cp_comm} is how ranks of cp meet, and cp is 1", more=more)
    if p.cp_comm and runs.cp_comm and p.cp_comm not in runs.cp_comm and not runs.launched:
        message = f"{draft.profile.name} runs cp by {listed(runs.cp_comm)}, not by {p.cp_comm}"
        yield refusal("cp-comm-runs", WHERE, message, Offer(WHERE, tuple(runs.cp_comm), "cp_comm"), more="no cp_comm")
    cuts = tuple(size for size in divisors(p.cp) if 1 < size < p.cp)
    offers = (Offer(SIZE, cuts, "cp_a2a_size"), Offer(WHERE, ("p2p", "a2a"), "cp_comm", also=((SIZE, None),)))
    if is_both and p.cp_a2a_size is None and p.cp > 1:
        message = f"{BOTH} needs cp_a2a_size, the ranks of cp {p.cp} that exchange sequence for heads"
        yield refusal("cp-a2a-size", WHERE, message, *offers)
    elif is_both and p.cp > 1 and p.cp_a2a_size not in cuts:
        message = f"{p.cp_a2a_size} cuts cp {p.cp} into no groups of several ranks with a ring between them"
        yield refusal("cp-a2a-size", SIZE, message, *offers)
    elif p.cp_a2a_size is not None and not is_both:
        message = f"{p.cp_a2a_size} is of cp_comm {BOTH}, and cp_comm is {p.cp_comm or 'not given'}"
        yield refusal("cp-a2a-size", SIZE, message, more=f"no cp_a2a_size, or cp_comm {BOTH}")


def exchanged_head_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Every rank of an exchange gets as many attention heads and kv heads as the others, or a copy of a kv head
    where the runtime repeats them."""
    job, p = draft.job, draft.job.parallel
    if job.model is None or (parts := p.head_parts) == 1:
        return
    ranks, repeats, kv_heads = p.tp * parts, draft.profile.runs.repeats_kv_heads, job.model.kv_heads
    uneven = [plural(job.model.heads, "attention head")] if job.model.heads % ranks else []
    uneven += [] if deals_kv_heads(kv_heads, ranks, repeats=repeats) else [plural(kv_heads, "kv head")]
    if not uneven:
        return
    is_whole = p.cp_comm == "a2a"
    name, key = ("cp", "parallel.cp") if is_whole else ("cp_a2a_size", SIZE)
    dealt = f"{p.cp_comm} deals heads to tp {p.tp} x {name} {parts} = {plural(ranks, 'rank')}"
    legal = tuple(k for k in divisors(p.cp) if 1 < k < p.cp and deals_heads(job.model, p.tp, k, repeats=repeats))
    offers = [Offer(key, legal, name)]
    if is_whole and legal and BOTH in draft.profile.runs.cp_comm:
        offers.append(Offer(WHERE, (BOTH,), "cp_comm", also=((SIZE, legal[-1]),), suffix=f" with {SIZE} {legal[-1]}"))
    offers.append(_others(job, draft.profile, ("p2p", "all_gather")))
    yield refusal("cp-divides-heads", key, f"{dealt}, which do not divide {' and '.join(uneven)}", *offers)


def exchanged_attention_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The model's attention is one that this cp_comm computes."""
    job, comm = draft.job, draft.job.parallel.stated_cp_comm
    if job.model is None or comm is None:
        return
    for rule, what, legal in _needs(job.model, draft.profile):
        if comm not in legal:
            message = f"{comm} with {what}: {listed(legal)} alone computes it"
            yield refusal(rule, WHERE, message, _others(job, draft.profile, legal), more="no cp_comm, or cp 1")


def _needs(model: ModelSpec, profile: RuntimeProfile) -> Iterator[tuple[str, str, tuple[CpComm, ...]]]:
    """What the model's attention has: the rule, its words, and the values of cp_comm that compute it."""
    if model.attention_window is not None:
        yield "cp-comm-window", f"attention_window {model.attention_window}", ("all_gather", "a2a")
    if model.attention_sinks:
        yield "cp-comm-sinks", "attention_sinks", ("a2a",)
    own: tuple[CpComm, ...] = ("all_gather",) if profile.runs.launched else ()
    if model.position == "relative" or model.decoder_layers:
        yield "cp-comm-bias", "relative positions, a bias of the scores", ("p2p", *own)
    elif model.position == "alibi":
        yield "cp-comm-bias", "alibi, a bias of the scores", ("p2p", *own, *EXCHANGES[: len(own)])


def _others(job: JobSpec, profile: RuntimeProfile, legal: tuple[CpComm, ...]) -> Offer:
    runs = profile.runs.cp_comm
    also = ((SIZE, None),) if job.parallel.cp_a2a_size is not None else ()
    values = tuple(comm for comm in legal if comm != job.parallel.cp_comm and (not runs or comm in runs))
    return Offer(WHERE, values, "cp_comm", also=also)
