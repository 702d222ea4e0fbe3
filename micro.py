"""
The paper's model in one file: a GPT some of whose layers loop (arXiv 2509.23314; Geiping:
2502.05171), and Algorithm 1, by which each token exits when it is still. The run ends with what is
new here, and not in the papers: tokens that sleep, and wake when news arrives.

    python micro.py             learns torch's own documentation, about a minute on two cores
    python micro.py book.txt    learns your own text

    bytes -> embed -> block -> group -> group -> group -> block -> norm -> head -> logits
    a group:  x = noise,  then again and again  x = norm(core(adapter([x ; e])))

    e, x       the stream that enters a group; its state, x^(k) after k loop steps
    delta      the update of a loop step, Eq. 1;  tau  the threshold of Algorithm 1
    streak     how many accelerations below tau a token has had in a row; two make it still
    moved      which tokens are not still;  awake  which tokens take the loop step
    B, T, C    rows, tokens, width;  H, D  heads, width of a head
"""
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

vocab, T, C, H = 256, 48, 64, 2             # a token is a byte
n_layer, groups = 6, [[1], [2, 3], [4]]     # layers, and which of them loop, from 0
r, sigma = 4, 0.5   # loops in training: r + 1 on average; sigma of their lognormal rate
bptt = 3            # loop steps with gradients, the last ones
iterations, batch, lr = 700, 12, 5e-3


class Block(nn.Module):
    """The sandwich of Geiping 3.2: a norm before each branch, and one after its sum with x."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(C, eps=1e-6) for _ in range(4))
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.mlp_in = nn.Linear(C, 4 * C, bias=False)
        self.mlp_out = nn.Linear(4 * C, C, bias=False)

    def forward(self, x, awake=None, cache=None):
        """
        x (B, T, C) -> (B, T, C). awake (B, T): which tokens loop, None = all. cache: {block: (k,
        v)}, the last keys and values; a token that does not loop keeps its own.
        """
        qkv = self.qkv(self.n1(x)).unflatten(-1, (3, H, -1))                    # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                    # (B, H, T, D) each
        if awake is not None:
            now = awake[:, None, :, None]                                       # (B, 1, T, 1)
            old_k, old_v = cache.get(self, (k, v))      # the first step, of all, needs no old ones
            k, v = torch.where(now, k, old_k), torch.where(now, v, old_v)
            cache[self] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)             # (B, H, T, D)
        x = self.n2(x + self.attn_out(y.transpose(1, 2).flatten(2)))
        return self.n4(x + self.mlp_out(F.silu(self.mlp_in(self.n3(x)))))


class RecurrentGroup(nn.Module):
    """Layers that loop: a fixed number of times, or until Algorithm 1 lets each token exit."""

    def __init__(self, core):
        super().__init__()
        self.core, self.norm = nn.ModuleList(core), nn.RMSNorm(C, eps=1e-6)
        self.adapter = nn.Linear(2 * C, C, bias=False)
        self.adapter.weight.data = torch.eye(C).repeat(1, 2)   # Geiping: random; exercises.md, 4

    def step(self, x, e, awake=None, cache=None):
        x = self.adapter(torch.cat((x, e), dim=-1))                             # (B, T, C)
        for block in self.core:
            x = block(x, awake, cache)
        return self.norm(x)

    def forward(self, e, n_loop, tau=None):
        """
        e (B, T, C) -> the last states (B, T, C), and the list of all states x^(0) ... x^(n_loop),
        or with tau the loop steps (B, T) that Algorithm 1 keeps, at most n_loop.
        """
        x = noise_like(e)
        if tau is not None:
            cache = {}
            return loop(lambda state, awake: self.step(state, e, awake, cache), x, n_loop, tau)
        states = [x]
        for k in range(n_loop):     # Geiping 3.3: gradients flow through the last steps only
            with torch.set_grad_enabled(self.training and k >= n_loop - bptt):
                x = self.step(x, e)
            states.append(x)
        return x, states


def noise_like(e):
    """x^(0), a normal of variance 2/5; Geiping App. C.1 also cuts it at three deviations."""
    return 0.4 ** 0.5 * torch.randn_like(e)


def loop(f, x, k_max, tau, readers=None):
    """
    Algorithm 1: a token is still once its acceleration has been below tau twice in a row.

    Returns the last states (B, T, C) and how many steps each one kept (B, T). f(x, awake): the
    block map. Without readers a still token exits for good. With them it sleeps while all tokens
    that it reads are still, and wakes when one of them moves: readers(moved) = who reads a token
    that moved, (B, T) -> (B, T). Here each token is computed in each step; loops.py computes the
    awake alone, where a token reads few others.
    """
    awake = torch.ones(x.shape[:2], dtype=torch.bool)               # (B, T)
    streak, steps_used = torch.zeros(2, *x.shape[:2], dtype=torch.int)
    delta = None
    for _ in range(k_max):
        x1 = torch.where(awake[..., None], f(x, awake), x)  # a sleeper takes a step of length 0
        delta_prev, delta = delta, x1 - x                                       # Eq. 1
        if delta_prev is not None:
            small = (delta - delta_prev).norm(dim=-1) < tau                     # Eq. 5
            # a sleeper keeps its streak: its step of length 0, after a long one, would end it
            streak = torch.where(awake, (streak + 1) * small, streak)
        moved = streak < 2
        next_awake = moved if readers is None else moved | readers(moved)
        keeps = awake & next_awake          # the step in which a token stops is thrown away
        x = torch.where(keeps[..., None], x1, x)
        steps_used += keeps
        awake = next_awake
        if not awake.any():
            break
    return x, steps_used


class GPT(nn.Module):
    """The layers between an embedding and a head of the same weights."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, C), nn.Embedding(T, C)
        layers = [Block() for _ in range(n_layer)]
        for group in reversed(groups):      # from the back, so that layer numbers stay right
            start, end = group[0], group[-1] + 1
            layers[start:end] = [RecurrentGroup(layers[start:end])]
        self.h = nn.ModuleList(layers)
        self.ln_f = nn.RMSNorm(C, eps=1e-6)
        # Geiping App. C.1 (there cut at three deviations), for all matrices but the adapters
        depth = n_layer + (r - 1) * sum(map(len, groups))   # Geiping: a looped layer is r layers
        for name, p in self.named_parameters():
            if p.dim() == 2 and 'adapter' not in name:
                variance = 1 / (5 * C * depth) if name.endswith('_out.weight') else 2 / (5 * C)
                nn.init.normal_(p, std=variance ** 0.5)

    def forward(self, idx, n_loop, tau=None):
        """
        idx (B, T) -> logits (B, T, vocab), and the trace: of each group its states, or with tau the
        loop steps kept. n_loop: a list, the loop steps of each group, with tau the most of them.
        """
        x = C ** 0.5 * (self.wte(idx) + self.wpe.weight[:idx.shape[1]])         # C.1; (B, T, C)
        trace = []
        for layer in self.h:
            if isinstance(layer, RecurrentGroup):
                x, record = layer(x, n_loop[len(trace)], tau)
                trace.append(record)
            else:
                x = layer(x)
        return self.ln_f(x) @ self.wte.weight.T, trace


def get_batch(text, B):
    at = torch.randint(len(text) - T, (B, 1)) + torch.arange(T + 1)             # (B, T + 1)
    return text[at[:, :-1]], text[at[:, 1:]]


def train_step(model, optimizer, x, y, n_loop):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, n_loop)[0].mT, y)       # of (B, vocab, T), nats per byte
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# what a run shows ---------------------------------------------------------------------------------

def show_loops(model, x, y):
    """The held-out loss by the number of loops."""
    for n in 1, 2, 4, 8:
        logits, _ = model(x, [n] * len(groups))
        print(f'loops of each group: {n}, held-out loss {F.cross_entropy(logits.mT, y):.3f}')


def show_scales(model, x):
    """
    The two scales: the loop steps of a group, and the jump from its last state to that of the next
    group. The first step, out of the noise, is longer than the jump, so the mean leaves it out. The
    paper's Eq. 2 counts it, and measures the jump to the next group's x^(0), which is noise. With
    more loops the steps shrink, so the ratio grows. The paper's cosines settle at 0.5 to 0.65. Here
    those of layers [2, 3] settle lower, the others near 1; exercise 4 changes their sign.
    """
    _, trace = model(x, [8] * len(groups))
    for g, group in enumerate(groups):
        states = torch.stack(trace[g])                                          # (9, B, T, C)
        delta = states.diff(dim=0)                                              # (8, B, T, C)
        norms = delta.norm(dim=-1).mean((1, 2))
        cosines = F.cosine_similarity(delta[1:], delta[:-1], dim=-1).mean((1, 2))
        later = norms[1:].mean()
        print(f'\nlayers {group}, mean length of loop steps 2 to 8: {later:.2f}')
        print('  loop step                  ', *(f'{k:5d}' for k in range(1, len(states))))
        print('  length                     ', *(f'{norm:5.3f}' for norm in norms))
        print('  cosine with the step before', ' ' * 5, *(f'{cosine:5.2f}' for cosine in cosines))
        if g + 1 < len(groups):
            jump = (trace[g + 1][-1] - states[-1]).norm(dim=-1).mean()
            print(f'jump to the next group {jump:.2f}, {jump / later:.1f} times that mean')


def show_exits(model, x, y):
    """Algorithm 1: the loss, and the loops of a token, by the threshold."""
    print('\nAlgorithm 1: loops that a token keeps in each group, mean (least to most), of 30')
    for tau in 0.1, 1, 10:
        logits, used = model(x, [30] * len(groups), tau)
        print(f'tau = {tau:3}: held-out loss {F.cross_entropy(logits.mT, y):.3f}, loops',
              ', '.join(f'{u.float().mean():.1f} ({u.min()} to {u.max()})' for u in used))


def write(model, text):
    """The model continues the text, 200 bytes after the bar, with Algorithm 1."""
    idx = text[None, :T]
    for _ in range(200):
        logits, _ = model(idx[:, -T:], [30] * len(groups), tau=1)
        idx = torch.cat((idx, torch.multinomial((logits[:, -1] / 0.8).softmax(-1), 1)), dim=1)
    prompt, new = (bytes(part.tolist()).decode(errors='replace') for part in idx[0].split((T, 200)))
    print(f'\n{prompt} | {new}')


def show_chain(what_it_does, readers=None, n=16):
    """
    A chain: each token copies the one before, and the first becomes 1. In the model above a token
    reads all earlier ones: it would sleep only once they are all still, and then none could wake
    it. Here, with readers, a token takes at most 7 loop steps, however long the chain is: 3 until
    it is still, and 4 for the news.
    """
    steps = []                          # who is awake in each loop step

    def copy(x, awake):
        steps.append(awake[0])
        return F.pad(x, (0, 0, 1, -1), value=1)     # (1, n, 1): all move on by one, 1 comes in

    x, _ = loop(copy, torch.zeros(1, n, 1), n + 10, 0.5, readers)
    print('\na chain: each token copies the one before it, and the first becomes 1. Once still, a '
          f'token {what_it_does}. o: awake in this loop step')
    for k, awake in enumerate(steps, start=1):
        print(f'{k:4}  ' + ''.join('o' if is_awake else '.' for is_awake in awake))
    print(f'{int(x.sum())} of {n} tokens right after {len(steps)} loop steps, of which a token '
          f'takes {torch.stack(steps).sum() / n:.1f}')


def main():
    torch.manual_seed(1337)
    path = sys.argv[1] if len(sys.argv) > 1 else torch.__path__[0] + '/_torch_docs.py'
    text = torch.tensor(list(Path(path).read_bytes()))
    n = len(text) * 9 // 10             # the last tenth is held out
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for it in range(1, iterations + 1):
        # the learning rate rises for almost 50 iterations, and falls over the whole run to 2%
        optimizer.param_groups[0]['lr'] = lr * min(it / 50, 1.02 - it / iterations)
        # how often each group loops: a Poisson draw of a lognormal rate (Geiping Eq. 1 and 2)
        rate = r * (sigma * torch.randn(len(groups)) - sigma ** 2 / 2).exp()
        n_loop = 1 + torch.poisson(rate).int()
        loss = train_step(model, optimizer, *get_batch(text[:n], batch), n_loop.tolist())
        if it % 100 == 0:
            print(f'iteration {it}: loss {loss:.3f}')
    model.eval()
    with torch.no_grad():
        x, y = get_batch(text[n:], 64)
        show_loops(model, x, y)
        show_scales(model, x)
        show_exits(model, x, y)
        write(model, text[n:])
    show_chain('exits for good')
    # a token that moved is read by the next one
    show_chain('sleeps until news arrives', lambda moved: F.pad(moved, (1, -1)))


if __name__ == '__main__':
    main()
