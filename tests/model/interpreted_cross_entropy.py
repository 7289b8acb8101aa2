"""Liger's fused linear cross-entropy beside our head, through Triton's interpreter.

A process of its own with TRITON_INTERPRET=1; prints a JSON object of relative differences. Only
some positions are trained, and a factor is put on the sum afterwards, as the train step does.
"""

from __future__ import annotations

import json

from interpreted_triton import close_gaps, launches

TOKENS, HIDDEN, VOCABULARY, FACTOR = 24, 32, 96, 0.37


def main() -> None:
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    from ds_sft.model.loss import LossHead

    close_gaps()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).float()
    values = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).float() * 0.3
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    trained = torch.rand(TOKENS, generator=generator) < 0.6

    def of(kind: str, masked: bool) -> dict[str, torch.Tensor]:
        hidden = start.clone().requires_grad_()
        weight = torch.nn.Parameter(values.clone())
        mask = trained if masked else torch.zeros_like(trained)
        if kind == "ours":
            positions = mask.nonzero()[:, 0]
            total = LossHead(weight, 7)(hidden, positions, targets[positions])
        elif kind == "liger":
            labels = torch.where(mask, targets, -100)
            total = LigerFusedLinearCrossEntropyFunction.apply(
                hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
            )[0]
        else:
            logits = (hidden @ weight.t()).double()
            total = (logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0])[mask].sum()
        (total * FACTOR).backward()
        return {"loss": total.detach(), "hidden": hidden.grad, "weight": weight.grad}

    plain, ours, liger = (of(kind, masked=True) for kind in ("plain", "ours", "liger"))
    said = {
        f"{name} of {who}": ((got[name].double() - plain[name].double()).norm()
                             / plain[name].double().norm()).item()
        for who, got in (("ours", ours), ("liger", liger))
        for name in plain
    }  # fmt: skip
    for who in ("ours", "liger"):
        nothing = of(who, masked=False)
        said[f"nothing trained, {who}"] = max(x.abs().max().item() for x in nothing.values())
    print(json.dumps({"launches": sum(launches.values()), **said}))


if __name__ == "__main__":
    main()
