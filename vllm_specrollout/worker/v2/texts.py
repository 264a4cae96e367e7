"""Placeholder."""
class DeviceTexts: pass
