"""OpenTelemetry traces: step records, journeys and request spans, in every framing."""
