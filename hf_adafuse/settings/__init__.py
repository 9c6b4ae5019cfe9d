"""The rules of the settings.

`config_checks`: what each field may be, and which are of no use with the others. `old_fields`: settings as earlier
versions wrote them. The settings themselves, with their presets, are in `hf_adafuse.config`.
"""
