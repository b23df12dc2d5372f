{{/*
The configuration as TOML. Not by Helm's toToml: it writes 9836 as 9836.0, and a port is a whole number.
A scalar's JSON is its TOML; tables within a section become inline tables.
*/}}
{{- define "hangwatch.toml" -}}
{{- range $section, $keys := . }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "hangwatch.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hangwatch.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }}, {{ end }}{{ $key }} = {{ include "hangwatch.tomlValue" (get $ $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[{{ range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "hangwatch.tomlValue" $item }}{{ end }}]
{{- else -}}
{{ toJson . }}
{{- end }}
{{- end }}
