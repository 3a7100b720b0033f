"""The demo family: made the same every time, and behaving like a flow model with a VAE around it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from egrpo.backends import demo
from egrpo.backends.diffusers_flux import DiffusersFluxPolicy
from egrpo.schedule import flow_sigmas
from egrpo.sde import euler
from tools import make_demo

PROMPTS = ("a red circle", "a blue square on a white background")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoFiles:
    return demo.demo_files(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def encoder(files: demo.DemoFiles) -> demo.DemoTextEncoder:
    return demo.load_text_encoder(files.text_encoder)


def digests(files: demo.DemoFiles) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files.all()]


def test_the_same_bytes_every_time(files: demo.DemoFiles, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert digests(demo.demo_files(tmp_path)) == digests(files)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert not list(tmp_path.rglob("*.partial"))


def test_existing_files_are_kept(tmp_path: Path) -> None:
    path = demo.demo_paths(tmp_path).flux
    path.parent.mkdir(parents=True)
    path.write_bytes(b"trained")
    assert demo.demo_files(tmp_path).flux.read_bytes() == b"trained"


def test_the_variable_moves_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.FOLDER_VARIABLE, str(tmp_path))
    assert demo.demo_paths().vae.is_relative_to(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=demo.FOLDER_VARIABLE):
        demo.demo_files(tmp_path / "file")


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors is not a file of the demo family"):
        demo.load_transformer(tmp_path / "other.safetensors")


def test_make_demo_prints_the_digests(files: demo.DemoFiles, capsys: pytest.CaptureFixture) -> None:
    assert make_demo.main(["--folder", str(files.flux.parents[1])]) == 0
    printed = capsys.readouterr().out
    assert all(digest in printed for digest in digests(files))


def test_the_flow_stays_bounded_and_follows_the_prompt(files: demo.DemoFiles) -> None:
    policy = DiffusersFluxPolicy.from_demo(folder=files.flux.parents[1], device="cpu")
    sigmas = flow_sigmas(16, 3.0).tolist()
    noise = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(0))

    def ode(velocity):
        x = noise
        deviations = []
        for now, after in zip(sigmas, sigmas[1:]):
            v = velocity(x, now)
            deviations.append(v.std().item())
            x = euler(x, v, now, after)
        return x, deviations

    finals = []
    for condition in policy.encode(PROMPTS):
        x, deviations = policy.rollout(condition, ode)
        assert 0.4 < min(deviations) and max(deviations) < 1.5
        assert x.abs().max() < 5
        finals.append(x)
    assert (finals[0] - finals[1]).abs().mean() > 0.2
    assert (finals[0][0] - finals[0][1]).abs().mean() > 0.2, "and the noise"


def test_latents_of_unit_variance_decode_to_varied_unsaturated_images(files: demo.DemoFiles) -> None:
    vae = demo.load_vae(files.vae)
    latents = torch.randn(8, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    images = vae.decode(latents).sample / 2 + 0.5
    assert images.shape == (8, 3, 64, 64)
    assert ((images <= 0) | (images >= 1)).float().mean() < 0.03
    assert images.std() > 0.1
    assert (images[:, 0] - images[:, 1]).std() > 0.1, "coloured, not grey"


def test_the_decoder_is_smooth(files: demo.DemoFiles) -> None:
    """Neighbouring pixels differ less than an 8x8 mosaic of the same colours would at its edges."""
    vae = demo.load_vae(files.vae)
    latents = torch.zeros(1, 16, 8, 8)
    latents[:, :3, :, 4:] = 1.0
    images = vae.decode(latents).sample / 2
    step = demo.COLOUR_PER_LATENT * 3 * torch.tensor(1 / 3).tanh()
    assert images.diff(dim=-1).abs()[..., 16:48].max() < step / 4


def test_the_encoder_recovers_the_mean_colour(files: demo.DemoFiles) -> None:
    vae = demo.load_vae(files.vae)
    flat = torch.tensor([0.7, 0.4, 0.5]).view(1, 3, 1, 1).expand(1, 3, 64, 64)
    latents = vae.encode(flat * 2 - 1).latents
    assert latents.shape == (1, 16, 8, 8)
    again = vae.decode(latents).sample / 2 + 0.5
    inside = again[..., 16:-16, 16:-16].mean((2, 3))
    assert torch.allclose(inside[0], torch.tensor([0.7, 0.4, 0.5]), atol=0.02)


def test_encoding_is_the_mean_of_eight_by_eight_pixels(files: demo.DemoFiles) -> None:
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    latents = demo.load_vae(files.vae).encode(image * 2 - 1).latents
    means = torch.nn.functional.avg_pool2d(image, 8)
    assert torch.allclose(latents[:, :3] * demo.COLOUR_PER_LATENT + 0.5, means, atol=1e-5)
    assert not latents[:, 3:].any()


@pytest.mark.parametrize(("prompt", "rows"), [("", 1), ("a red circle", 1), ("red " * 18, 1), ("red " * 19, 2)])
def test_text_shapes(encoder: demo.DemoTextEncoder, prompt: str, rows: int) -> None:
    sequence, pooled = demo.encode_text(encoder, prompt)
    assert sequence.shape == (1, 20 * rows, 128)
    assert pooled.shape == (1, 128)


def test_words_matter_and_case_and_commas_do_not(encoder: demo.DemoTextEncoder) -> None:
    red, same, blue = (demo.encode_text(encoder, text)[1] for text in ("a red circle", "A, Red circle!", "a blue circle"))
    assert torch.equal(red, same)
    assert (red - blue).abs().mean() > 0.1


def test_unknown_words_are_token_zero(encoder: demo.DemoTextEncoder) -> None:
    assert encoder.tokenizer.words("a zebra") == [encoder.tokenizer.vocabulary["a"], 0]


def test_skipping_empty_blocks_changes_no_bit(files: demo.DemoFiles) -> None:
    from diffusers import AutoencoderTiny
    from safetensors.torch import load_file

    stored = load_file(files.vae)
    full = AutoencoderTiny(latent_channels=16, scaling_factor=1.0, shift_factor=0.0)
    full.load_state_dict({key: stored[demo._comfy_vae_key(key)] for key in full.state_dict()})
    fast = demo.load_vae(files.vae)
    latents = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        assert torch.equal(fast.decode(latents).sample, full.decode(latents).sample)
        assert torch.equal(fast.encode(image).latents, full.encode(image).latents)
    assert sum(isinstance(layer, type(full.decoder.layers[2])) for layer in fast.decoder.layers) == 0
