"""
Self-speculation (Geiping 5): draft some tokens with few loops, then check them with all.

    B, T       rows, of which there is one; tokens of a pass
"""
from dataclasses import replace

import torch

from cache import Span
from decode.passes import one_token
from loops import of_groups


class Drafts:
    """
    Self-speculation (Geiping 5): draft up to `tokens` tokens with few loops, then run them side by
    side with all loops, and keep those that agree. Draft and check use the same draws, so that the
    text is that of plain decoding.
    """
    cache, name = 'exact', 'draft_loops'

    def __init__(self, plan, loops, tokens=4):
        if not 1 <= loops < min(plan.counts, default=1):
            raise ValueError(f'draft_loops must lie between 1 and n_loop - 1, not {loops}')
        if plan.exit and plan.exit.by_row:
            raise ValueError(f"the rule '{plan.exit.name}' reads all tokens of a pass at once, so "
                             'drafts would change the text: choose another, or leave out drafts')
        if tokens < 1:
            raise ValueError(f'draft_tokens must be at least 1, not {tokens}')
        self.loops, self.tokens = loops, tokens

    def begin(self, token, states):
        """Nothing to remember: a draft starts from the cache alone."""

    def next_tokens(self, model, plan, rows, most):
        # less than `tokens` if the window or `most` lacks room (the check adds one token)
        few = replace(plan, counts=[self.loops] * len(plan.counts), exit=None)
        position = rows.position
        room = min(self.tokens, rows.block_size - 1 - position, most - 1)
        tokens = [rows.last]
        for i in range(room):
            logits, _, _ = one_token(model, tokens[-1], position + i, few)
            # the check finds a NaN, too; until then the draft is any token
            tokens.append(rows.draw(logits[:, None], skip=i).clamp(min=0))
        # check: all loops on all of them at once, which overwrites the keys and values of the draft
        inputs = torch.cat(tokens, dim=1)               # last, d1, d2 ...: (1, 1 + room)
        span = Span(position, 1 + room, inputs.device)
        x, found = model.hidden(inputs, replace(plan, span=span, width=1 + self.tokens))
        made = rows.draw(model.lm_head(x))              # t1, t2, t3 ...: (1, 1 + room)
        # keep t1, t2 ... up to and including the first that differs from its draft. Later drafts
        # leave keys behind the last token; they are overwritten before anything reads them
        numbers = rows.numbers(torch.cat((inputs[:, 1:], made), dim=1))
        drafts, numbers = numbers[:room], numbers[room:]
        agree = next((i for i in range(room) if drafts[i] != numbers[i]), room)
        steps = of_groups(found, 'steps_used', inputs)[0].split(1)
        return list(zip(made.split(1, dim=1), steps, zip(numbers)))[:agree + 1]
