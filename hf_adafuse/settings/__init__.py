"""The rules of the settings.

`config_checks`: what each field may be, and which are of no use with the others. `old_fields`: settings as earlier
versions wrote them. The settings themselves, with their presets, are `hf_adafuse.config`, which all may know. This room
must not know models, tokenizers or tensors.
"""
