"""
The paper in one file: a GPT some of whose layers loop (arXiv 2509.23314; Geiping: 2502.05171).

    python micro.py             learns torch's own documentation, about a minute on two cores
    python micro.py book.txt    learns your own text

    bytes -> embed -> block -> group -> group -> group -> block -> norm -> head -> logits
    a group:  x = noise,  then again and again  x = norm(core(adapter([x ; e])))

    e, x       the stream that enters a group; its state, x^(k) after k loop steps
    delta      the update of a loop step, Eq. 1;  tau  the threshold of Algorithm 1
    B, T, C    rows, tokens, width;  H, D  heads, width of a head
"""
import sys

import torch
import torch.nn as nn
from torch.nn import functional as F

vocab, T, C, H = 256, 48, 64, 2             # a token is a byte
n_layer, groups = 6, [[1], [2, 3], [4]]     # layers, and which of them loop, from 0
r, bptt = 4, 3      # mean_recurrence, bptt_k: r + 1 loops on average, the last 3 with gradients
iterations, batch, lr = 700, 12, 5e-3


class Block(nn.Module):
    """Attention and MLP, each between two norms: the sandwich of Geiping 3.2."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(C, eps=1e-6) for _ in range(4))
        self.qkv, self.attn_out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x, active=None, cache=None):                              # x (B, T, C)
        q, *kv = self.qkv(self.n1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        if active is not None:      # a token that has exited keeps the keys and values it had
            kv = cache[self] = [torch.where(active[:, None, :, None], new, old)
                                for new, old in zip(kv, cache.get(self, kv))]
        y = F.scaled_dot_product_attention(q, *kv, is_causal=True)              # (B, H, T, D)
        x = self.n2(x + self.attn_out(y.transpose(1, 2).flatten(2)))
        return self.n4(x + self.mlp_out(F.silu(self.mlp_in(self.n3(x)))))


class RecurrentGroup(nn.Module):
    """Layers that loop -> the last state and (e, all states), or with tau the loops kept."""

    def __init__(self, core):
        super().__init__()
        self.core, self.norm = nn.ModuleList(core), nn.RMSNorm(C, eps=1e-6)
        self.adapter = nn.Linear(2 * C, C, bias=False)
        self.adapter.weight.data = torch.eye(C).repeat(1, 2)                    # starts as x + e

    def step(self, x, e, active=None, cache=None):
        x = self.adapter(torch.cat((x, e), dim=-1))                             # (B, T, C)
        for block in self.core:
            x = block(x, active, cache)
        return self.norm(x)

    def forward(self, e, n_loop, tau=None):
        states, cache = [0.4 ** 0.5 * torch.randn_like(e)], {}  # x^(0); Geiping cuts it at 3 sigma
        if tau is not None:
            return loop(lambda x, active: self.step(x, e, active, cache), states[0], n_loop, tau)
        for k in range(n_loop):     # Geiping 3.3: gradients flow through the last steps only
            with torch.set_grad_enabled(self.training and k >= n_loop - bptt):
                states.append(self.step(states[-1], e))
        return states[-1], (e, states)


def loop(f, x, k_max, tau):
    """Algorithm 1: each token loops until its acceleration is below tau twice in a row."""
    active = torch.ones(x.shape[:2], dtype=torch.bool)                          # (B, T)
    small, delta, steps_used, k = ~active, torch.inf, 0, 0      # delta = inf: no hit in step 1
    while k < k_max and active.any():
        x1 = f(x, active)
        delta_prev, delta = delta, x1 - x                                       # Eq. 1
        small_prev, small = small, (delta - delta_prev).norm(dim=-1) < tau      # Eq. 5
        active = active & ~(small & small_prev)     # two hits in a row: exit, x1 is thrown away
        x, steps_used, k = torch.where(active[..., None], x1, x), steps_used + active.int(), k + 1
    return x, steps_used


class GPT(nn.Module):
    """idx (B, T), n_loop of each group -> logits (B, T, vocab), and what each group returns."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, C), nn.Embedding(T, C)
        layers = [Block() for _ in range(n_layer)]
        for group in reversed(groups):              # a group takes the place of its layers
            layers[group[0]:group[-1] + 1] = [RecurrentGroup(layers[group[0]:group[-1] + 1])]
        self.h, self.ln_f = nn.ModuleList(layers), nn.RMSNorm(C, eps=1e-6)
        depth = n_layer + (r - 1) * sum(map(len, groups))
        for name, p in self.named_parameters():     # Geiping App. C.1; norms stay 1
            if p.dim() == 2 and 'adapter' not in name:      # attn_out, mlp_out: by the depth
                nn.init.normal_(p, std=((1 / depth if 'out' in name else 2) / (5 * C)) ** 0.5)

    def forward(self, idx, n_loop, tau=None):
        x, found = C ** 0.5 * (self.wte(idx) + self.wpe.weight[:idx.shape[1]]), []
        for layer in self.h:
            if isinstance(layer, RecurrentGroup):
                x, of_group = layer(x, n_loop[len(found)], tau)
                found.append(of_group)
            else:
                x = layer(x)
        return self.ln_f(x) @ self.wte.weight.T, found


def get_batch(text, B):
    at = torch.randint(len(text) - T, (B, 1)) + torch.arange(T + 1)             # (B, T + 1)
    return text[at[:, :-1]], text[at[:, 1:]]


def train_step(model, optimizer, x, y, n_loop):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, n_loop)[0].mT, y)       # of (B, vocab, T), nats a byte
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def show(model, text):
    x, y = get_batch(text, 64)
    for n in 1, 2, 4, 8:
        logits, found = model(x, [n] * len(groups))
        print(f'{n} loops of each group: held-out loss {F.cross_entropy(logits.mT, y):.3f}')
    for group, (e, states) in zip(groups, found):   # with 8 loops
        delta = torch.stack(states).diff(dim=0)                                 # (n, B, T, C)
        norms, cosines = delta.norm(dim=-1), F.cosine_similarity(delta[1:], delta[:-1], dim=-1)
        print(f'\nlayers {group} move the stream by {(states[-1] - e).norm(dim=-1).mean():.2f}')
        print('  norm of each update      ', *(f'{n:.3f}' for n in norms.mean((1, 2))))
        print('  its cosine with the one before ', *(f'{c:5.2f}' for c in cosines.mean((1, 2))))
    print('\nAlgorithm 1: loops that a token keeps in each group, mean (least to most), of 30')
    for tau in 0.1, 1, 10:
        logits, steps_used = model(x, [30] * len(groups), tau)      # 30 is k_max
        print(f'tau = {tau:3}: held-out loss {F.cross_entropy(logits.mT, y):.3f}, loops',
              ', '.join(f'{u.float().mean():.1f} ({u.min()} to {u.max()})' for u in steps_used))
    idx = text[None, :T]                            # the model continues the held-out text
    for _ in range(200):
        logits, _ = model(idx[:, -T:], [30] * len(groups), tau=1)
        idx = torch.cat((idx, torch.multinomial((logits[:, -1] / 0.8).softmax(-1), 1)), dim=1)
    print(f'\n{bytes(idx[0].tolist()).decode(errors="replace")}')


def main():
    torch.manual_seed(1337)
    path = sys.argv[1] if len(sys.argv) > 1 else torch.__path__[0] + '/_torch_docs.py'
    try:
        text = torch.tensor(list(open(path, 'rb').read()))
        if len(text) < 20 * T:
            raise ValueError(f'{path} has {len(text)} bytes, too few: take at least {20 * T}')
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    model, n = GPT(), len(text) * 9 // 10           # the last tenth of the text is held out
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for it in range(1, iterations + 1):
        optimizer.param_groups[0]['lr'] = lr * min(it / 50, 1.02 - it / iterations)     # up, down
        # how often each group loops: a Poisson draw of a lognormal rate (Geiping Eq. 1 and 2)
        n_loop = 1 + torch.poisson(r * (0.5 * torch.randn(len(groups)) - 0.125).exp())
        loss = train_step(model, optimizer, *get_batch(text[:n], batch), n_loop.int().tolist())
        if it % 100 == 0:
            print(f'iteration {it}: loss {loss:.3f}', flush=True)
    show(model.eval(), text[n:])


if __name__ == '__main__':
    main()
