"""ComfyUI-EGRPO: what ComfyUI reads when it loads the pack."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
