"""Templates in the styles of well-known families of models, written for the tests."""

CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n"
    "{{ .Content }}<|im_end|>\n"
    "{{ end }}<|im_start|>assistant\n"
)

LLAMA3 = """{{- if .System }}<|start_header_id|>system<|end_header_id|>

{{ .System }}<|eot_id|>
{{- end }}
{{- range .Messages }}
{{- if ne .Role "system" }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>
{{- end }}
{{- end }}<|start_header_id|>assistant<|end_header_id|>

"""

MISTRAL = """
{{- $count := len .Messages }}
{{- range $at, $message := .Messages }}
{{- $rest := slice $.Messages $at }}
{{- $is_last := eq (len $rest) 1 }}
{{- if eq $message.Role "user" }}
{{- if and $.Tools $is_last }}[AVAILABLE_TOOLS] {{ json $.Tools }}[/AVAILABLE_TOOLS]
{{- end }}[INST] {{ if and $is_last $.System }}{{ $.System }}

{{ end }}{{ $message.Content }}[/INST]
{{- else if eq $message.Role "assistant" }}
{{- if $message.Content }} {{ $message.Content }}</s>
{{- else if $message.ToolCalls }}[TOOL_CALLS] [
{{- range $i, $call := $message.ToolCalls }}{{ if $i }}, {{ end -}}
{"name": "{{ $call.Function.Name }}", "arguments": {{ json $call.Function.Arguments }}}
{{- end }}]</s>
{{- end }}
{{- else if eq $message.Role "tool" }}[TOOL_RESULTS] {"content": {{ json .Content }}}
{{- "[/TOOL_RESULTS]" }}
{{- end }}
{{- end }}"""

GEMMA = """<bos>
{{- $first := true }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if or (eq .Role "user") (eq .Role "tool") }}<start_of_turn>user
{{ if and $first $.System }}{{ $.System }}

{{ end }}{{ .Content }}<end_of_turn>
{{ $first = false }}
{{- else if eq .Role "assistant" }}<start_of_turn>model
{{ .Content }}{{ if not $last }}<end_of_turn>
{{ end }}
{{- end }}
{{- if and $last (ne .Role "assistant") }}<start_of_turn>model
{{ end }}
{{- end }}"""

QWEN = """{{- /* a block for the system and the tools */ -}}
{{- define "system" }}<|im_start|>system
{{- with .System }}
{{ . }}
{{- end }}
{{- if .Tools }}

# Tools
<tools>
{{- range .Tools }}
{"type": "function", "function": {{ json .Function }}}
{{- end }}
</tools>
{{- end }}<|im_end|>
{{ end }}
{{- if or .System .Tools }}{{ template "system" . }}{{ end }}
{{- range $i, $m := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "system" }}{{ continue }}{{ end }}
{{- if eq .Role "user" }}<|im_start|>user
{{ .Content }}
{{- if and $.IsThinkSet $last }} {{ if $.Think }}/think{{ else }}/no_think{{ end }}
{{- end }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ with .Content }}{{ . }}
{{- else }}<tool_call>
{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", "arguments": {{ "" -}}
{{ .Function.Arguments }}}
{{ end }}</tool_call>
{{- end }}{{ if not $last }}<|im_end|>
{{ end }}
{{- else if eq .Role "tool" }}<|im_start|>user
<tool_response>
{{ .Content }}
</tool_response><|im_end|>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant
{{ end }}
{{- end }}"""

ALPACA = """{{ if .System }}{{ .System }}

{{ end }}{{ if .Prompt }}### Instruction:
{{ .Prompt }}

{{ end }}### Response:
{{ .Response }}

"""

FILLS_IN = "{{- if .Suffix }}<PRE> {{ .Prompt }} <SUF>{{ .Suffix }} <MID>{{ else }}" + (
    "{{ .Prompt }}{{ end }}"
)

TYPES = """{{- range .Tools }}
{{- range $name, $property := .Function.Parameters.Properties }}
{{ $name }}: {{ toTypeScriptType $property }}, // {{ $property.Type }}
{{- with $property.Description }} {{ . }}{{ end }}
{{- range $i, $value := $property.Enum }} {{ printf "%d=%v" $i $value }}{{ end }}
{{- end }}
{{- end }}
{{- range .Messages }}{{ printf "%s=%q;" .Role .Content }}{{ end }}"""
