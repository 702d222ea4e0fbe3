"""
Self-speculation (Geiping 5): draft some tokens with few loops, then check them with all.

    B, T       rows, of which there is one; tokens of a pass
"""
from dataclasses import dataclass, replace

import torch

from cache import Span
from decode.passes import NewToken, one_token
from loops import of_groups


@dataclass
class Drafts:
    """
    A decoder, see passes.py: draft up to `tokens` tokens with `loops` loops, then run them side by
    side with all loops, and keep those that agree. Draft and check use the same draws, so that the
    text is that of plain decoding.
    """
    loops: int
    tokens: int = 4
    policy, name = 'exact', 'draft_loops'

    def start(self, model, plan):
        if not 1 <= self.loops < min(plan.counts, default=1):
            raise ValueError(f'draft_loops must lie between 1 and n_loop - 1, not {self.loops}')
        if plan.rule and plan.rule.by_row:
            raise ValueError(f"the rule '{plan.rule.name}' reads all tokens of a pass at once, so "
                             'drafts would change the text: choose another, or leave out drafts')
        if self.tokens < 1:
            raise ValueError(f'draft_tokens must be at least 1, not {self.tokens}')

    def begin(self, token, outputs):
        """Nothing to remember: a draft starts from the cache alone."""

    def next_tokens(self, model, plan, rows, most):
        # at most `tokens` drafts; the window and `most` need room for the token that the check adds
        position = rows.position
        room = min(self.tokens, rows.block_size - 1 - position, most - 1)
        few_loops = replace(plan, counts=[self.loops] * len(plan.counts), rule=None)
        tokens = [rows.last]
        for i in range(room):
            logits, _, _ = one_token(model, tokens[-1], position + i, few_loops)
            tokens.append(rows.draw(logits[:, None], skip=i))

        # check: all loops on all of them at once, which overwrites the keys and values of the draft
        inputs = torch.cat(tokens, dim=1)               # last, d1, d2 ...: (1, 1 + room)
        span = Span(position, 1 + room, inputs.device)
        x, results = model.hidden(inputs, replace(plan, span=span, width=1 + self.tokens))
        checked = rows.draw(model.lm_head(x))           # t1, t2, t3 ...: (1, 1 + room)
        numbers = rows.numbers(torch.cat((inputs[:, 1:], checked), dim=1))
        draft_ids = numbers[:room]
        checked_ids = numbers[room:]

        # keep t1, t2 ... up to and including the first that differs from its draft. Later drafts
        # leave keys behind the last token; they are overwritten before anything reads them
        kept = 1
        while kept <= room and draft_ids[kept - 1] == checked_ids[kept - 1]:
            kept += 1
        steps_used = of_groups(results, 'steps_used', inputs)                    # (1, T, groups)
        return [NewToken(checked[:, i:i + 1], steps_used[:, i], checked_ids[i:i + 1])
                for i in range(kept)]
