"""The bundled decoder-only models: one tokenizer, one corpus, short trainings.

``emad-tiny``        12 layers, with an early-exit loss at the probe layers (LayerSkip, Elhoushi et al. 2024, §4.1,
                     in small): loss = CE(last layer) + Σ_ℓ w_ℓ · CE(head(norm(h_ℓ))).
``emad-tiny-plain``  the same without that loss, like an ordinary model.
``emad-nano``        4 narrow layers: the small partner of a pair.

Matrices of the blocks are trained by Muon, everything else by AdamW: on this corpus Muon needs about half the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from emad_ref.text import world
from emad_ref.training.recipe import END_OF_TEXT, Recipe, TrainingFamily

VOCABULARY = 512
TOKENIZER_DOCUMENTS = 20_000

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("emad-tiny", early_exit=((4, 0.25), (8, 0.25))),
        Recipe("emad-tiny-plain", steps=1800),
        Recipe("emad-nano", layers=4, hidden=64, steps=3000),
    )
}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that all bundled models share; end-of-text opens every document."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    stream = world.generate_documents("world:curriculum", "train")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((next(stream) for _ in range(TOKENIZER_DOCUMENTS)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def iterate_batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Tensor]:
    """Endless int64 [batch, window + 1]: documents of the curriculum, each opened by end-of-text, packed end to end."""
    stream = world.generate_documents("world:curriculum", "train", recipe.seed + 1)
    need = recipe.batch * (recipe.window + 1)
    ids: list[int] = []
    while True:
        while len(ids) < need:
            for encoding in tokenizer.backend_tokenizer.encode_batch([next(stream) for _ in range(256)]):
                ids += [tokenizer.bos_token_id, *encoding.ids]
        yield torch.tensor(ids[:need]).view(recipe.batch, -1)
        ids = ids[need:]


def create_initial_model(recipe: Recipe) -> GPTNeoXForCausalLM:
    """Random weights from the recipe's seed, without changing the caller's generator."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=4 * recipe.hidden,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return GPTNeoXForCausalLM(config)


def compute_loss(model: GPTNeoXForCausalLM, recipe: Recipe, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss to minimise, cross-entropy of the last layer in nats per token) on ids int64 [batch, window + 1]."""
    body = model.gpt_neox(ids[:, :-1], output_hidden_states=bool(recipe.early_exit), use_cache=False)
    target = ids[:, 1:].reshape(-1)

    def cross_entropy(normed: Tensor) -> Tensor:
        return F.cross_entropy(model.get_output_embeddings()(normed).flatten(0, 1), target)

    last = cross_entropy(body.last_hidden_state)
    total = last
    for layer, weight in recipe.early_exit:
        total = total + weight * cross_entropy(model.gpt_neox.final_layer_norm(body.hidden_states[layer]))
    return total, last.detach()


def create_optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """[Muon for the blocks' matrices, AdamW for embedding, head, norms, biases and tables of position biases]."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layer" in n and "bias" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


FAMILY = TrainingFamily(train_tokenizer, create_initial_model, iterate_batches, compute_loss, create_optimisers)
