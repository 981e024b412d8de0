#define KEYHOLE_PATH avx2_path
#define KEYHOLE_VECTOR "vector_avx2.h"
#define KEYHOLE_PROMPT_TILES "prompt_tiles_packed.h"
#include "path.h"
