// Rows of tokens as floats, and back, for every type of number and feature map.
#pragma once
#include "call.h"
#include "simd/vector.h"

namespace mnemos {
namespace {

typedef void (*Fetch)(float*, i64, const char*, i64, i64, i64, const unsigned char*, i64);
typedef void (*Deliver)(const float*, i64, char*, i64, i64, i64, const float*);
const Fetch FETCH[3][3] = {{fetch<FLOAT32, IDENTITY>, fetch<FLOAT32, ELU>, fetch<FLOAT32, RELU>},
                           {fetch<BFLOAT16, IDENTITY>, fetch<BFLOAT16, ELU>, fetch<BFLOAT16, RELU>},
                           {fetch<FLOAT16, IDENTITY>, fetch<FLOAT16, ELU>, fetch<FLOAT16, RELU>}};
const Deliver DELIVER[3] = {deliver<FLOAT32>, deliver<BFLOAT16>, deliver<FLOAT16>};

}  // namespace
}  // namespace mnemos
